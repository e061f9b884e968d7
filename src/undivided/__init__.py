"""Undivided attention: one call, any layout, any mask, any device, and the same answer from every kernel."""

import importlib
from typing import TYPE_CHECKING

from undivided import _interpreter as _interpreter  # isort: skip  (first: it raises before PyTorch is imported)
from undivided import _lazy, _vector_math, masks
from undivided._version import __version__ as __version__
from undivided.backends._table import backends
from undivided.errors import CacheFullError, InputError, NoBackendError
from undivided.functional import attention, explain, scaled_dot_product_attention
from undivided.machine import Machine
from undivided.request.result import merge
from undivided.request.slopes import alibi_slopes
from undivided.selection.decision import Decision, last_decision
from undivided.selection.policy import set_backends, use_backends

if TYPE_CHECKING:
    from undivided.cache import InferenceParams, KVCache, PagedKVCache
    from undivided.context_parallel import ContextParallel
    from undivided.diagnosis import diagnose
    from undivided.integrations.torch_sdpa import replace_sdpa
    from undivided.nn import (
        DotProductAttention,
        MultiheadAttention,
        RotaryPositionEmbedding,
        TransformerLayer,
        apply_rotary_pos_emb,
    )
    from undivided.verification import verify

__all__ = [
    "CacheFullError",
    "ContextParallel",
    "Decision",
    "DotProductAttention",
    "InferenceParams",
    "InputError",
    "KVCache",
    "Machine",
    "MultiheadAttention",
    "NoBackendError",
    "PagedKVCache",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "alibi_slopes",
    "apply_rotary_pos_emb",
    "attention",
    "backends",
    "diagnose",
    "explain",
    "last_decision",
    "masks",
    "merge",
    "replace_sdpa",
    "scaled_dot_product_attention",
    "set_backends",
    "use_backends",
    "verify",
]

# Imported at first use: what is built on attention takes longer to import than attention itself.
_LAZY = {
    "ContextParallel": "context_parallel",
    "DotProductAttention": "nn",
    "InferenceParams": "cache",
    "KVCache": "cache",
    "MultiheadAttention": "nn",
    "PagedKVCache": "cache",
    "RotaryPositionEmbedding": "nn",
    "TransformerLayer": "nn",
    "apply_rotary_pos_emb": "nn",
    "diagnose": "diagnosis",
    "replace_sdpa": "integrations.torch_sdpa",
    "verify": "verification",
}
_LAZY_PACKAGES = (
    "cache",
    "context_parallel",
    "diagnosis",
    "integrations",
    "nn",
    "parallel",
    "quantization",
    "verification",
)

_vector_math.choose_code()

if not TYPE_CHECKING:  # or type checkers would accept every name

    def __getattr__(name: str) -> object:
        """A public name, or a package of this one, that is imported at first use."""
        if name in _LAZY_PACKAGES:
            return importlib.import_module(f"undivided.{name}")
        return _lazy.first_use(__name__, _LAZY, name)


def __dir__() -> list[str]:
    """The names of this module, including those that are imported at first use."""
    return sorted({*globals(), *__all__, *_LAZY_PACKAGES} - {"TYPE_CHECKING", "importlib"})
