"""`replace_sdpa`: models that call PyTorch's scaled_dot_product_attention run on ours, unmodified.

One function, `_replacement`, stands in ``torch.nn.functional`` while any handle is active, whatever the order in which
handles are restored; the last one puts back what was there. If somebody else replaced the function in the meantime,
theirs stays, and what they kept of ours passes calls on to PyTorch.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.jit import _builtins
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_variadic

from undivided.functional import scaled_dot_product_attention

__all__ = ["Replacement", "replace_sdpa"]


class Replacement:
    """A replacement in force. ``calls`` is how many calls ran on Undivided since; ``restore()`` ends it.

    A call inside ``torch.compile`` counts while it is traced (once or a few times), not when the compiled graph runs.
    """

    def __init__(self) -> None:
        self.calls = 0
        _install(self)

    @property
    def active(self) -> bool:
        """Whether it is in force."""
        return any(handle is self for handle in _active)

    def restore(self) -> None:
        """End it. Other replacements stay in force; a second call does nothing."""
        if self.active:
            _remove(self)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"<replace_sdpa: {'active' if self.active else 'restored'}, {self.calls} calls>"


def replace_sdpa() -> Replacement:
    """Replace ``torch.nn.functional.scaled_dot_product_attention`` by `undivided.scaled_dot_product_attention`.

    For the process, until ``restore()`` or the end of the ``with``. Whoever looks the function up in
    ``torch.nn.functional`` at the call gets ours: ``F.scaled_dot_product_attention(...)``, ``nn.MultiheadAttention``,
    ``nn.TransformerEncoderLayer``. A name bound before, by ``from torch.nn.functional import
    scaled_dot_product_attention``, stays PyTorch's.

    ``nn.MultiheadAttention`` computes the attention itself, without calling the function, where ``need_weights=True``
    (its default) and in its C++ fast path. The fast path is switched off meanwhile (`torch.backends.mha`);
    ``need_weights`` is the caller's. Nested tensors are passed on to PyTorch.

    Returns:
        A handle with ``calls`` and ``restore()``, which is a context manager as well.

    Raises:
        Nothing here. While it is active a wrong call raises `InputError` (a ValueError) where PyTorch raises
        RuntimeError.

    Source: the calls that modules make are those of torch.nn.modules.activation and torch.nn.modules.transformer.

    >>> import torch, undivided
    >>> from torch.nn import functional as F
    >>> q = torch.randn(1, 2, 5, 8)
    >>> with undivided.replace_sdpa() as replaced:
    ...     out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> replaced.calls
    1
    """
    return Replacement()


_active: list[Replacement] = []
_pytorchs: Any = functional.scaled_dot_product_attention
"""Where calls that are not ours go. Found once: whoever replaces it later may call us, and we must not call them
back."""
_before: Any = None
_fast_path_before = True


def _install(handle: Replacement) -> None:
    global _before, _fast_path_before
    if not _active:
        _fast_path_before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
    if functional.scaled_dot_product_attention is not _replacement:
        _before = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = _replacement
    _builtins._register_builtin(_replacement, "aten::scaled_dot_product_attention")  # for torch.jit.script
    _active.append(handle)


def _remove(handle: Replacement) -> None:
    _active[:] = [other for other in _active if other is not handle]
    if _active:
        return
    torch.backends.mha.set_fastpath_enabled(_fast_path_before)
    _builtins._get_builtin_table().pop(id(_replacement))
    if functional.scaled_dot_product_attention is _replacement:
        functional.scaled_dot_product_attention = _before


def _replacement(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's scaled_dot_product_attention, served by Undivided."""
    if has_torch_function_variadic(query, key, value) and not _are_nested(query, key, value):
        # torch.fx's proxies put this function into their graph; tensors that have their own idea of it see it as
        # PyTorch's
        return handle_torch_function(
            _replacement,
            (query, key, value),
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if not _serve(query, key, value):
        out: Tensor = _pytorchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_replacement.__name__ = _replacement.__qualname__ = "scaled_dot_product_attention"


def _are_nested(*tensors: Tensor) -> bool:
    """Whether any is nested, asked so that tensors which see every function called with them do not see this."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(getattr(tensor, "is_nested", False) is True for tensor in tensors)


def _serve(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the call is ours, and count it. Nested tensors are not."""
    try:
        if query.is_nested or key.is_nested or value.is_nested:
            return False
    except AttributeError:  # not tensors: the checks to come say so
        pass
    return _count()


def _count() -> bool:
    """Whether calls are ours now, and count one. What torch.jit.trace records is not: it must run without this
    library."""
    if torch._C._is_tracing():
        return False
    for handle in _active:
        handle.calls += 1
    return bool(_active)


# torch.compile calls it while tracing and keeps the answer; counting in the graph would recompile at every call
_count._dynamo_marked_constant = True  # type: ignore[attr-defined]
