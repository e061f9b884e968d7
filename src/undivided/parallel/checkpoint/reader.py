"""Reading a checkpoint without running code of its files.

`torch.distributed.checkpoint` unpickles a checkpoint's list of contents, and entries that are not tensors, without
restrictions: such a file can run any code. Here both are limited to the types that `save_checkpoint` writes.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from undivided.errors import InputError

_CONTENTS = "torch.distributed.checkpoint.metadata"
_TYPES = {
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_CONTENTS, "BytesStorageMetadata"),
    (_CONTENTS, "ChunkStorageMetadata"),
    (_CONTENTS, "Metadata"),
    (_CONTENTS, "MetadataIndex"),
    (_CONTENTS, "StorageMeta"),
    (_CONTENTS, "TensorProperties"),
    (_CONTENTS, "TensorStorageMetadata"),
    (_CONTENTS, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _TYPES:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """Reads the files of a checkpoint's folder.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The contents of the checkpoint; the arguments, for contents of a rank alone, are ignored.

        Raises:
            InputError: the file is damaged, or holds anything but the contents of a checkpoint.
        """
        try:
            with (self._folder / ".metadata").open("rb") as file:
                metadata = _Unpickler(file).load()
        except OSError:
            raise
        except Exception as error:  # of the unpickler, for a file with any bytes
            raise _damaged(self._folder, f"{type(error).__name__}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise _damaged(self._folder, type(metadata).__name__)
        for place in (metadata.storage_data or {}).values():
            if Path(place.relative_path).name != place.relative_path:
                raise _damaged(self._folder, f"a file in another folder, {place.relative_path}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _damaged(folder: Path, got: str) -> InputError:
    return InputError("folder", f"have the contents of a checkpoint in {folder.name}/.metadata", got)
