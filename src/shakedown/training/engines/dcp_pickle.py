"""The pickles of torch.distributed.checkpoint, from which nothing but its own records is built.

A checkpoint's `.metadata` is a pickle, and so is what each rank's writer says of its files. A
pickle is a program: torch reads it with Python's own unpickler, which imports and calls whatever it
names.
"""

import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from shakedown.core.errors import StorageError

_RECORDS = (
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    dcp.TensorStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.TensorProperties,
    dcp._MEM_FORMAT_ENCODING,
    # The two before as earlier releases of torch 2 wrote them.
    sharded.TensorProperties,
    sharded.MEM_FORMAT_ENCODING,
    _StorageInfo,
    WriteResult,
)
# By name: what is not here is not even imported.
_BUILT: dict[str, Any] = {
    **{f"{record.__module__}.{record.__qualname__}": record for record in _RECORDS},
    **{
        f"torch.{name}": kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)
    },
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "pathlib.PosixPath": pathlib.PosixPath,
    "pathlib._local.PosixPath": pathlib.PosixPath,  # as Python 3.13 writes it
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _BUILT[f"{module}.{name}"]
        except KeyError:
            # repr: a name out of a file is not printed as it is.
            raise pickle.UnpicklingError(
                f"it asks for {f'{module}.{name}'!r}, which no checkpoint holds"
            ) from None


def read_records(path: Path) -> Any:
    """The records that torch wrote into a file.

    Raises:
        StorageError: it cannot be read, is damaged, or asks for anything but torch's records.
    """
    try:
        with path.open("rb") as stream:
            return _Unpickler(stream).load()
    except Exception as error:  # a crafted pickle makes the unpickler raise almost anything
        reason = getattr(error, "strerror", None) or error or type(error).__name__
        raise StorageError(f"cannot read {path}: {reason}") from error
