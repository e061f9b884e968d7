"""What a forward pass on one rank's tokens knows of the whole batch: sizes, padding and documents, and so its masks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.context_parallel.context import ContextParallel
from undivided.errors import InputError
from undivided.integrations.transformers._masks import packed_mask, to_mask
from undivided.integrations.transformers._model_mask import MaskSizes, ModelMask
from undivided.integrations.transformers._patterns import Packed, Pattern
from undivided.masks import Mask


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """One rank's part of the sequences of a batch, under the name ``shard`` in the result of `shard_batch`.

    Attributes:
        context: a `ContextParallel` that is bound to the length of the whole sequence; ``context.unshard(logits,
            dim=1)`` joins the logits of all ranks.
        batch, length: sequences of the batch, and tokens of a whole sequence.
        device: of the batch's tensors.
        padding: the real tokens, bool ``[batch, length]``; None if all are real.
        packed: documents by position; None if there are none.
        offsets: documents by cumulative lengths, int ``[documents + 1]``; None if there are none.

    >>> import undivided
    >>> SequenceShard(undivided.ContextParallel(rank=0, world=2).bind(8), 1, 8, torch.device("cpu")).context.world
    2
    """

    context: ContextParallel
    batch: int
    length: int
    device: torch.device
    padding: Tensor | None = None
    packed: Packed | None = None
    offsets: Tensor | None = None

    def model_mask(self, pattern: Pattern, batch: int, length: int) -> ModelMask:
        """The mask over the tokens of all ranks.

        Args:
            pattern: of the model's mask function for this rank's tokens; its documents and padding are replaced by
                those of the whole batch.
            batch, length: sizes of this rank's tokens, as the model sees them.

        Returns:
            A `ModelMask` with the `ContextParallel`.

        Raises:
            InputError: the tokens are not those of this shard, or the mask function is unknown.
        """
        own = self.context.positions(within_documents=False).numel()
        if (batch, length) != (self.batch, own):
            raise InputError(
                "batch",
                f"have this rank's {self.batch} x {own} tokens",
                f"{batch} x {length}",
                hint="pass the whole result of shard_batch to the model, and nothing else",
            )
        has_ids = pattern.packed is not None and pattern.packed.positions is None  # not those of the model's positions
        if pattern.rest or has_ids:
            names = ", ".join(getattr(fn, "__qualname__", repr(fn)) for fn in pattern.rest) or "ids of documents"
            raise InputError(
                "mask_function",
                "be causal, a window, chunks or bidirectional if the sequence is spread over ranks",
                names,
                hint="a function of this rank's tokens is unknown for those of other ranks",
            )
        sizes = MaskSizes(self.batch, self.length, self.length)
        mask = self._mask(pattern, sizes)
        return ModelMask(mask, pattern, MaskSizes(batch, length, length), self.device, context=self.context)

    def _mask(self, pattern: Pattern, sizes: MaskSizes) -> Mask:
        if self.offsets is not None:
            bare = dataclasses.replace(pattern, packed=None, padding=())
            return packed_mask(bare, self.offsets, self.offsets, None, None)
        padding = () if self.padding is None else (self.padding,)
        chunks = tuple(dataclasses.replace(chunk, start=self._first_real()) for chunk in pattern.chunks)
        whole = dataclasses.replace(pattern, packed=self.packed, padding=padding, chunks=chunks)
        return to_mask(whole, sizes, self.device)

    def _first_real(self) -> Tensor:
        """The number of padding tokens before each sequence, int64 ``[batch]``, from which chunks are counted."""
        if self.padding is None:
            return torch.zeros(self.batch, dtype=torch.int64, device=self.device)
        return (self.padding.cumsum(-1) == 0).sum(-1)
