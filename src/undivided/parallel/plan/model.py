"""The sizes of a transformer, its parameters, and its multiply-adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from undivided.arguments.checks import checked_flag
from undivided.errors import InputError

__all__ = ["PRESETS", "Model"]

_LARGEST = 1 << 40


def check_count(argument: str, value: object, most: int) -> None:
    """InputError unless it is an integer from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(argument, f"be an integer from 1 to {most}", repr(value))


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder: an embedding, equal layers, a norm, and a head that shares nothing with the embedding.

    Attributes:
        layers: number of layers.
        hidden: features of the hidden states.
        heads, kv_heads, head_dim: number of query heads and of key heads, and their size.
        ffn: features between the maps of the feed-forward block.
        vocabulary: number of tokens.
        gated: the feed-forward block is gated (swiglu): its first map has twice `ffn` features.
        bias: the linear maps of the layers have biases.
        norm_bias: the norms have biases (LayerNorm); otherwise a weight alone (RMSNorm).

    Raises:
        InputError: a size is not a positive integer, or kv_heads does not divide heads.

    >>> PRESETS["8b"].parameters
    8030261248
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    gated: bool = True
    bias: bool = False
    norm_bias: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                checked_flag(field.name, value)
            else:
                check_count(field.name, value, _LARGEST - 1)
        if self.heads % self.kv_heads:
            raise InputError("kv_heads", f"divide heads ({self.heads})", self.kv_heads)

    def layer_parameters(self, tensor: int = 1) -> int:
        """The parameters of a layer on one of `tensor` ranks, as `undivided.parallel.parallelize` divides them.

        Weights of heads and of feed-forward features are divided. Norms, the biases of the output maps, and the maps of
        keys and values of which there are fewer heads than ranks, are the same on every rank.
        """
        query, keys, inner = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim, self._inner
        whole_keys = self.kv_heads % tensor != 0
        divided = (query + inner + (0 if whole_keys else keys)) * (self.hidden + self.bias)
        divided += (query + self.ffn) * self.hidden
        replicated = keys * (self.hidden + self.bias) if whole_keys else 0
        replicated += 2 * self.hidden * (self.bias + 1 + self.norm_bias)
        return divided // tensor + replicated

    @property
    def outer_parameters(self) -> int:
        """The parameters of the embedding, the last norm and the head; tensor ranks do not divide them."""
        return 2 * self.vocabulary * self.hidden + self.hidden * (1 + self.norm_bias)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters() + self.outer_parameters

    @property
    def _inner(self) -> int:
        """Output features of the first map of the feed-forward block."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def layer_multiply_adds(self) -> int:
        """Multiply-adds of the linear maps of a layer, per token."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (attention + self._inner + self.ffn)


PRESETS: Mapping[str, Model] = MappingProxyType(
    {
        "1b": Model(16, 2048, 32, 8, 64, 8192, 128256),
        "8b": Model(32, 4096, 32, 8, 128, 14336, 128256),
        "70b": Model(80, 8192, 64, 8, 128, 28672, 128256),
        "405b": Model(126, 16384, 128, 8, 128, 53248, 128256),
        "gpt3": Model(96, 12288, 96, 96, 128, 49152, 50257, gated=False, bias=True, norm_bias=True),
    }
)
"""Named sizes: Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783; 1b: Llama 3.2), and GPT-3 (Brown et al. 2020,
arXiv:2005.14165), with a head of its own."""
