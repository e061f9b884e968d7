"""`replace_sdpa`: unmodified models that call PyTorch's scaled_dot_product_attention run on this library.

The function `_replacement` is in ``torch.nn.functional`` while at least one handle is active; the last handle restores
the previous function, in whatever order handles are restored. If other code has replaced the function in the meantime,
its function stays, and a reference to `_replacement` that it kept passes calls on to PyTorch.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.jit import _builtins
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_variadic

from undivided import sdpa
from undivided.arguments.signature import checked_call
from undivided.run.sdpa import jagged

__all__ = ["Replacement", "replace_sdpa"]


class Replacement:
    """An active replacement of PyTorch's function; ``restore()`` ends it.

    Attributes:
        calls: number of calls that ran on Undivided during the replacement. A call inside ``torch.compile`` counts when
            it is traced (once or a few times), not when the compiled graph runs.

    >>> import undivided
    >>> with undivided.replace_sdpa() as replaced:
    ...     print(replaced.active)
    True
    >>> replaced.active
    False
    """

    def __init__(self) -> None:
        self.calls = 0
        try:
            with _lock:
                _install(self)
        except BaseException:  # such as that of Ctrl-C: the caller gets no handle
            self.restore()
            raise

    @property
    def active(self) -> bool:
        """Whether the replacement is active."""
        return any(handle is self for handle in _active)

    @property
    def bound_before(self) -> list[str]:
        """Names in imported modules that are PyTorch's function, whose calls do not run on Undivided.

        ``from torch.nn.functional import scaled_dot_product_attention`` before the replacement binds such a name.
        """
        found = []
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] not in ("torch", "undivided"):
                values = list(getattr(module, "__dict__", {}).items())
                found += [f"{name}.{attribute}" for attribute, value in values if value is _pytorch_sdpa]
        return sorted(found)

    def restore(self) -> None:
        """End the replacement. Others stay active; a second call does nothing."""
        with _lock:
            _remove(self)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.restore()
        except BaseException:  # such as that of Ctrl-C
            self.restore()
            raise

    def __repr__(self) -> str:
        return f"<replace_sdpa: {'active' if self.active else 'restored'}, {self.calls} calls>"


@checked_call
def replace_sdpa() -> Replacement:
    """A handle that replaces ``torch.nn.functional.scaled_dot_product_attention`` by ours until it is restored.

    The replacement is for the whole process, until ``restore()`` or the end of the ``with``. Calls that look up the
    function in ``torch.nn.functional`` get ours: ``F.scaled_dot_product_attention(...)``, ``nn.MultiheadAttention``,
    ``nn.TransformerEncoderLayer``. Names that were bound before, by ``from torch.nn.functional import
    scaled_dot_product_attention``, keep PyTorch's function; ``bound_before`` lists them.

    ``nn.MultiheadAttention`` does not call the function with ``need_weights=True`` (its default) or in its C++ fast
    path. The fast path is disabled during the replacement (`torch.backends.mha`); ``need_weights`` is the caller's
    choice. Nested tensors are passed on to PyTorch.

    Returns:
        A `Replacement` with ``calls`` and ``restore()``, which is also a context manager.

    Raises:
        Nothing here. During the replacement a wrong call raises `InputError` (a ValueError) instead of PyTorch's
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
"""The handles that are not restored."""
_lock = threading.Lock()
"""Held while a handle is installed or removed."""
_pytorch_sdpa: Any = functional.scaled_dot_product_attention
"""PyTorch's function, for calls that are not ours. Read once, because a later replacement may call ours."""
_previous: Any = None
"""The function in ``torch.nn.functional`` before the first active handle, which the last one restores."""
_previous_fast_path: bool | None = None
"""Whether the fast path of ``nn.MultiheadAttention`` was enabled then; None if there is nothing to restore."""


def _install(handle: Replacement) -> None:
    global _previous, _previous_fast_path
    _active.append(handle)
    if _previous_fast_path is None:
        _previous_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    if functional.scaled_dot_product_attention is not _replacement:
        _previous = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = _replacement
    _builtins._register_builtin(_replacement, "aten::scaled_dot_product_attention")  # for torch.jit.script


def _remove(handle: Replacement) -> None:
    """Without the last handle, restore what was replaced. Repeated calls complete one that was interrupted."""
    global _previous_fast_path
    _active[:] = [other for other in _active if other is not handle]
    if _active or _previous_fast_path is None:
        return
    _builtins._get_builtin_table().pop(id(_replacement), None)
    if functional.scaled_dot_product_attention is _replacement:
        functional.scaled_dot_product_attention = _previous
    torch.backends.mha.set_fastpath_enabled(_previous_fast_path)
    _previous_fast_path = None


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
    """PyTorch's scaled_dot_product_attention, computed by Undivided."""
    if has_torch_function_variadic(query, key, value) and not _are_nested(query, key, value):
        # torch.fx records this function in its graph; tensor subclasses that override PyTorch's function get this one
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
    if _has_strided_nested(query, key, value) or not _count_call():
        out: Tensor = _pytorch_sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out
    return sdpa.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_replacement.__name__ = _replacement.__qualname__ = "scaled_dot_product_attention"
scaled_dot_product_attention = _replacement
"""Models that keep the function as an attribute are pickled with its name."""


def _are_nested(*tensors: Tensor) -> bool:
    """Whether a tensor is nested; tensor subclasses that intercept function calls do not see this query."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(getattr(tensor, "is_nested", False) is True for tensor in tensors)


def _has_strided_nested(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether there is a nested tensor that is not jagged: PyTorch computes the call."""
    try:
        return any(t.is_nested and not jagged.is_jagged(t) for t in (query, key, value))
    except AttributeError:  # not tensors: the later checks refuse them
        return False


def _count_call() -> bool:
    """Count a call for every active replacement; returns whether there is one.

    While torch.jit.trace records, no replacement is active: traces must run without this library.
    """
    if torch._C._is_tracing():
        return False
    for handle in _active:
        handle.calls += 1
    return bool(_active)


# torch.compile calls it while it traces and keeps the result; a count in the graph would recompile at every call
_count_call._dynamo_marked_constant = True  # type: ignore[attr-defined]
