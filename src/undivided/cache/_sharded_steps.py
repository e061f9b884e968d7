"""`ShardedSteps`: steps whose new tokens are divided over the ranks of a context, for long prompts."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.layout import SEQUENCE_AXIS, Layout
from undivided.cache._attend import CachedCall
from undivided.cache._batch import cumulative, padded
from undivided.cache._layer_caches import LayerCaches
from undivided.cache._ranks import PageRanks
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.request.result import Output


class LayerCall(NamedTuple):
    """The arguments of `InferenceParams.attend`."""

    layer_number: int
    q: Tensor
    new_k: Tensor
    new_v: Tensor
    qkv_format: str | None
    mask: Mask | None
    options: dict[str, Any]


class ShardedSteps(LayerCaches):
    """Each rank computes the layers for its part of the new tokens, as in training with context parallelism."""

    qkv_format: Layout
    _sharded: int | None  # new tokens of all ranks together, padding included, if the step is sharded

    @abstractmethod
    def _call(self, layer_call: LayerCall) -> CachedCall:
        """The call of `attend`, after the new tokens were written."""

    @outside_of_graphs
    def shard(self, tensor: Tensor) -> Tensor:
        """This rank's part of token ids, hidden states or labels, in a step with ``sharded=True``.

        Args:
            tensor: of all new tokens of the step, [b, s, ..], [s, b, ..] or [t, ..], depending on `qkv_format`; s is
                the largest number of new tokens of a sequence.

        Returns:
            The rows of this rank, in ascending order.

        Raises:
            InputError: the step is not sharded, or the tensor has another number of tokens.

        >>> import torch, undivided
        >>> from undivided.context_parallel import simulate
        >>> def rank(group):
        ...     cp = undivided.ContextParallel(group)
        ...     params = undivided.InferenceParams(1, 64, 1, 8, torch.float32, is_paged=True, page_size=4,
        ...                                        context_parallel=cp)
        ...     params.pre_step({"a": 8}, sharded=True)
        ...     return params.shard(torch.arange(8)[None]).tolist()
        >>> simulate(2, rank)
        [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
        """
        ranks, length = self._sharded_step()
        return ranks.shard(tensor, SEQUENCE_AXIS[self.qkv_format], length)

    @outside_of_graphs
    def unshard(self, tensor: Tensor) -> Tensor:
        """The tensor of all new tokens on every rank: the inverse of `shard`, for example for the last hidden states.

        Args:
            tensor: this rank's part.

        Returns:
            The rows of all ranks, in the order of the step.

        Raises:
            InputError: the step is not sharded, or the tensor has another number of tokens.
        """
        ranks, length = self._sharded_step()
        return ranks.unshard(tensor, SEQUENCE_AXIS[self.qkv_format], length)

    def own_positions(self) -> Tensor | None:
        """The positions of this rank's new tokens in their sequences, for rotary embeddings.

        Returns:
            int64 [b, s of this rank] in "bshd" and "sbhd", [t of this rank] in "thd"; None unless the step is sharded.
        """
        if self._sharded is None:
            return None
        ranks, length = self._sharded_step()
        step, rows = self._current_step(), ranks.positions(length)
        starts = padded(step.before, len(step.slots), rows.device).long()
        if self.qkv_format != "thd":
            return starts[:, None] + rows
        offsets = cumulative(step.counts, len(step.slots), rows.device).long()
        sequence = torch.searchsorted(offsets[1:], rows, right=True)
        return rows - offsets[sequence] + starts[sequence]

    @property
    def sharded_length(self) -> int | None:
        """The new tokens of all ranks along the axis of tokens, padding included; None unless the step is sharded."""
        return self._sharded

    def _sharded_step(self) -> tuple[PageRanks, int]:
        if self._ranks is None or self._sharded is None:
            hint = "inference_params.pre_step(step_dict, sharded=True), with context_parallel at construction"
            raise InputError("inference_params", "have a sharded step", "none, or one that is not sharded", hint)
        return self._ranks, self._sharded

    def _attend_sharded(self, layer_call: LayerCall) -> Output:
        """`attend` for this rank's tokens: the queries and the new keys of all ranks are gathered first."""
        ranks, length = self._sharded_step()
        if layer_call.qkv_format not in (None, self.qkv_format):
            must = f"be the qkv_format of inference_params ({self.qkv_format!r}) in a sharded step"
            raise InputError("qkv_format", must, repr(layer_call.qkv_format))
        if layer_call.options.get("bias") is not None:
            must = "be None in a sharded step: ranks have rows of it, and all queries are on every rank"
            raise InputError("bias", must, "a tensor", hint="pre_step(step_dict), with all tokens on every rank")
        own = {"q": layer_call.q, "new_k": layer_call.new_k, "new_v": layer_call.new_v}
        q, new_k, new_v = ranks.gather(own, self.qkv_format, length)
        whole = layer_call._replace(q=q, new_k=new_k, new_v=new_v, qkv_format=self.qkv_format)
        return ranks.attend(lambda: self._call(whole), length)
