"""Undivided attention: one call, any layout, any mask, any device, and the same answer from every kernel."""

from undivided import masks
from undivided._version import __version__ as __version__
from undivided.backends._table import backends
from undivided.cache import InferenceParams, KVCache, PagedKVCache
from undivided.context_parallel import ContextParallel
from undivided.diagnosis import diagnose
from undivided.errors import InputError, NoBackendError
from undivided.functional import attention, explain, scaled_dot_product_attention
from undivided.integrations.torch_sdpa import replace_sdpa
from undivided.machine import Machine
from undivided.nn import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
    apply_rotary_pos_emb,
)
from undivided.request.result import merge
from undivided.request.slopes import alibi_slopes
from undivided.selection.decision import Decision, last_decision
from undivided.selection.policy import set_backends, use_backends
from undivided.verification import verify

__all__ = [
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
