"""Checkpoints of training that load on another mesh: `torch.distributed.checkpoint`, written so that none is lost.

save_load.py         `save_checkpoint`, `load_checkpoint`, `checkpoint_steps`
folder.py            one folder per step, which gets its name when it is complete
state.py             the entries of a checkpoint, from a model and its optimizer
optimizer_state.py   the state of an optimizer, which PyTorch creates by a step
divided.py           planners for layers built with `tp_group`, whose parameters are plain parts of the whole
compare.py           what a model needs and what a checkpoint has, before anything is read
reader.py            reads the files without running code that they contain
"""

from undivided.parallel.checkpoint.save_load import Checkpoint, checkpoint_steps, load_checkpoint, save_checkpoint

__all__ = ["Checkpoint", "checkpoint_steps", "load_checkpoint", "save_checkpoint"]
