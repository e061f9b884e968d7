"""The base class of the modules whose heads and features tensor parallel ranks may divide."""

from __future__ import annotations

from typing import Any

from undivided.nn.arguments.tensor_parallel import TensorArguments
from undivided.nn.blocks.module import Module


class DividedModule(Module):
    """A module with TransformerEngine's arguments of tensor parallelism.

    Attributes:
        tensor_parallel: the checked arguments.
    """

    tensor_parallel: TensorArguments

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the ranks that hold the other heads, and the other parts of the weights.

        Args:
            tp_group: a `torch.distributed` process group of tp_size ranks; None: unknown ranks.

        Raises:
            InputError: it is not a process group, has another number of ranks, or the layer was divided by
                `undivided.parallel.parallelize`.
        """
        self.tensor_parallel = self.tensor_parallel.with_group(tp_group)
        self._set_ranks_of_parts(tp_group)

    def _set_ranks_of_parts(self, tp_group: Any) -> None:
        """Pass the ranks on to the blocks and modules that hold the parameters."""
