"""An unmodified model of transformers on a mesh of ranks: the sequence over one axis, heads and features over another.

_model.py   `parallelize`: what is checked, and the hooks around the forward pass
_batch.py   `shard_batch`: this rank's tokens, positions and shifted labels of a batch
_balance.py the balancing loss of experts over the tokens of all ranks
_shard.py   what a forward pass knows of the whole batch: its masks
_tensor.py  the tensor parallel plan of a model
"""

from undivided.integrations.transformers.parallel._batch import shard_batch
from undivided.integrations.transformers.parallel._model import parallelize
from undivided.integrations.transformers.parallel._shard import SequenceShard

__all__ = ["SequenceShard", "parallelize", "shard_batch"]
