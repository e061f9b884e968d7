"""The log-sum-exp as kernels take and return it: +inf for rows without keys, and with the sinks.

Legend: B batch, S queries, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lse_for_backward(lse_BHS: Tensor) -> Tensor:
    """The lse as backward kernels need it: +inf if a row has no key, so that exp(score - lse) is 0 and never NaN."""
    return lse_BHS.masked_fill(lse_BHS == -torch.inf, torch.inf).contiguous()


def without_sinks(lse_BHS: Tensor, sinks: Tensor) -> Tensor:
    """The log-sum-exp over keys alone, computed from a kernel's log-sum-exp over keys and sinks [H].

    If the sink outweighs the keys, digits are lost. The round trip through `with_sinks` is exact to rounding, but the
    value itself must not be returned to the caller.
    """
    sink = sinks.to(lse_BHS.dtype).unsqueeze(-1)
    return lse_BHS + torch.log1p(-torch.exp((sink - lse_BHS).clamp(max=0.0)))


def with_sinks(lse_BHS: Tensor, sinks: Tensor) -> Tensor:
    """The log-sum-exp over keys and sinks [H]; rows without keys stay -inf."""
    total = torch.logaddexp(lse_BHS, sinks.to(lse_BHS.dtype).unsqueeze(-1))
    return total.masked_fill(lse_BHS == -torch.inf, -torch.inf)
