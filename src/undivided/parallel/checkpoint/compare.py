"""What a model and its optimizer need, and what a checkpoint has: compared before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from undivided.arguments.checks import listed
from undivided.errors import InputError
from undivided.parallel.checkpoint.state import HEADER, MODEL, STATE

_FUSED = ("layernorm_qkv.weight", "qkv.weight", "key_value.weight")
_HINTS = {
    "another project": "undivided.integrations.checkpoints.from_hugging_face(state, model) converts its names",
    "one weight": "undivided.integrations.checkpoints.from_transformer_engine(state, model) converts fused weights",
    "names": "build the model of the checkpoint: the same number of layers, biases and normalisations",
    "sizes": "build the model of the checkpoint: the same hidden size, heads and features",
    "optimizer": "build the optimizer of the checkpoint: the same class, options and trained parameters",
}
"""What to do, by what differs: the project that wrote the names, fused weights, other names, sizes, the optimizer."""


def check_header(metadata: Metadata, path: Path) -> None:
    """Raise InputError unless `save_checkpoint` has written a checkpoint.

    Args:
        metadata: of the checkpoint.
        path: of its folder.
    """
    if HEADER not in metadata.state_dict_metadata:
        hint = "torch.distributed.checkpoint.load reads it, if that wrote it"
        raise InputError("folder", "have checkpoints of save_checkpoint", path.name, hint=hint)


def check_entries(
    metadata: Metadata,
    sizes: Mapping[str, torch.Size | None],
    path: Path,
    groups: Iterable[Mapping[str, Any]] | None = None,
) -> set[str]:
    """The entries of the optimizer that are not loaded, because a checkpoint has none of their parameters.

    Such a parameter had no gradient before the checkpoint was saved, so that the optimizer had no state for it.

    Args:
        metadata: of the checkpoint.
        sizes: by name, what is loaded: the size of a whole tensor, or None for anything else.
        path: of the checkpoint, for the message.
        groups: of the optimizer of the checkpoint, with names of parameters; None: no optimizer is loaded.

    Raises:
        InputError: "model" or "optimizer" differs from the checkpoint; the message lists names and sizes.
    """
    saved, unused = metadata.state_dict_metadata, set()
    for argument, prefix in (("model", MODEL), ("optimizer", STATE)):
        if argument == "optimizer" and groups is None:
            continue
        needed = {name for name in sizes if name.startswith(prefix)}
        stored_names = {name for name in saved if name.startswith(prefix)}
        if argument == "optimizer":
            if needed and not stored_names:
                raise InputError(argument, f"be None, because {path.name} has no optimizer state", "an optimizer")
            unused = _entries_of_unused(needed, stored_names, groups or ())
            needed -= unused
        _check_names(argument, prefix, needed, stored_names, path.name)
        _check_sizes(argument, prefix, {name: sizes[name] for name in sorted(needed)}, saved, path.name)
    return unused


def _entries_of_unused(needed: set[str], stored_names: set[str], groups: Iterable[Mapping[str, Any]]) -> set[str]:
    """The needed entries of parameters that the optimizer of the checkpoint had, without a state."""
    known = {name for group in groups for name in group["params"]}
    used = {_parameter(name) for name in stored_names}
    return {name for name in needed if _parameter(name) in known - used}


def _parameter(name: str) -> str:
    """The name of the parameter of an entry of the optimizer."""
    return name.removeprefix(STATE).rpartition(".")[0]


def check_files(metadata: Metadata, path: Path, hint: str = "copy it again, or pass an earlier step") -> None:
    """Raise InputError if a file of a checkpoint is absent or too short.

    Args:
        metadata: of the checkpoint.
        path: of its folder.
        hint: of the error.
    """
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    wrong = []
    for name, end in sorted(ends.items()):
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < end:
            wrong.append(f"{name} ({'absent' if size is None else f'{size} of {end} bytes'})")
    if wrong:
        raise InputError("folder", f"have all files of {path.name}", f"damaged: {listed(wrong)}", hint=hint)


def _check_names(argument: str, prefix: str, needed: set[str], stored_names: set[str], checkpoint: str) -> None:
    absent, other = (
        sorted(name.removeprefix(prefix) for name in names) for names in (needed - stored_names, stored_names - needed)
    )
    if not absent and not other:
        return
    parts = [f"{len(absent)} that the checkpoint lacks: {listed(absent)}"] if absent else []
    parts += [f"without {len(other)} that it has: {listed(other)}"] if other else []
    difference, entries = "names", "parameters"
    if argument == "optimizer":
        difference, entries = "optimizer", "tensors"
    elif any("_proj." in name for name in other):
        difference = "another project"
    elif any(name.endswith(_FUSED) for name in (*absent, *other)):
        difference = "one weight"
    must = f"have the {len(stored_names)} {entries} of {checkpoint}"
    raise InputError(argument, must, "; ".join(parts), hint=_HINTS[difference])


def _check_sizes(
    argument: str, prefix: str, needed: Mapping[str, torch.Size | None], saved: Mapping[str, Any], checkpoint: str
) -> None:
    wrong = []
    for name, size in needed.items():
        entry = saved[name]
        stored = list(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if stored != (None if size is None else list(size)):
            wrong.append(f"{name.removeprefix(prefix)} {_shape(size)} instead of {_shape(stored)}")
    if wrong:
        got = f"{len(wrong)} different: {listed(wrong)}"
        raise InputError(argument, f"have the sizes of {checkpoint}", got, hint=_HINTS["sizes"])


def _shape(size: Iterable[int] | None) -> object:
    return "a number" if size is None else list(size)
