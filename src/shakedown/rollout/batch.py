"""One training step's rollouts as arrays, and their file form."""

import hashlib
import io
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from shakedown.core.errors import StorageError, UsageError
from shakedown.core.files import atomic_open

_ARRAYS: dict[str, tuple[type[np.generic], int]] = {
    "versions": (np.int64, 1),
    "tokens": (np.int64, 2),
    "loss_mask": (np.bool_, 2),
    "logprobs": (np.float32, 2),
    "rewards": (np.float32, 1),
    "groups": (np.int64, 1),
}


# Exceptions of reading an arbitrary file; MemoryError: a header may claim any size.
_DAMAGED = (
    OSError,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    ArithmeticError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    UsageError,
    BadZipFile,
    zlib.error,
)
_TOKEN_VERSIONS = "token_versions"


@dataclass(frozen=True)
class RolloutBatch:
    """N sequences of at most T tokens, for training step `step` (from 1).

    `versions` [N]: the weights that wrote the sequence, of several the oldest. `tokens` [N, T]:
    prompt and completion, padded on the right. `loss_mask` [N, T]: True on sampled tokens, the end
    of sequence included.
    `logprobs` [N, T]: the engine's natural logarithms of sampled tokens, else 0. `rewards` [N].
    `groups` [N]: samples of one prompt share a number. `stats`: finite numbers about the making.
    `token_versions` [N, T]: the weights that wrote each sampled token, else -1; None: `versions`
    holds for all tokens of a sequence.
    `episodes` [N]: sequences of one episode share a number, a group and a reward; None: every
    sequence is an episode of its own.
    """

    step: int
    versions: NDArray[np.int64]
    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    rewards: NDArray[np.float32]
    groups: NDArray[np.int64]
    stats: Mapping[str, float] = field(default_factory=dict)
    token_versions: NDArray[np.int64] | None = None
    episodes: NDArray[np.int64] | None = None

    def check(self) -> None:
        """Raise UsageError where shapes, kinds or numbers do not fit together."""
        rows, columns = self.tokens.shape if self.tokens.ndim == 2 else (0, 0)
        for name, (kind, dimensions) in self._arrays():
            array = getattr(self, name)
            expected = (rows, columns)[:dimensions]
            if array.dtype != kind or array.shape != expected:
                raise UsageError(
                    f"batch {self.step}: {name} is {array.dtype}{list(array.shape)}, "
                    f"expected {np.dtype(kind)}{list(expected)}"
                )
        if not rows or not columns:
            raise UsageError(f"batch {self.step} has no {'tokens' if rows else 'sequences'}")
        if (self.tokens < 0).any() or (self.versions < 0).any():
            raise UsageError(f"batch {self.step} holds tokens or versions below 0")
        self._check_token_versions()
        numbers = [self.rewards, self.logprobs, np.array(list(self.stats.values()), dtype=float)]
        if not all(np.isfinite(each).all() for each in numbers):
            raise UsageError(
                f"batch {self.step} holds rewards, logprobs or stats that are NaN or infinite"
            )

    def _check_token_versions(self) -> None:
        """Check that `versions` has the version of the oldest token of every sequence."""
        found = self.token_versions
        if found is None:
            return
        if found.dtype != np.int64 or found.shape != self.tokens.shape:
            raise UsageError(
                f"batch {self.step}: token_versions is {found.dtype}{list(found.shape)}, "
                f"expected int64{list(self.tokens.shape)}"
            )
        # A sequence without a sampled token has no oldest one, and is not compared.
        oldest = np.where(self.loss_mask, found, np.iinfo(np.int64).max).min(1)
        if ((oldest != self.versions) & self.loss_mask.any(1)).any():
            raise UsageError(f"batch {self.step}: versions are not the oldest of token_versions")

    def _arrays(self) -> Iterator[tuple[str, tuple[type[np.generic], int]]]:
        yield from _ARRAYS.items()
        if self.episodes is not None:
            yield "episodes", _ARRAYS["groups"]


def write_batch(batch: RolloutBatch, path: Path) -> None:
    """Write atomically as .npz without pickle, with a checksum of its own.

    Raises:
        UsageError: the arrays do not fit together.
        StorageError: the file system is full or failed.
    """
    batch.check()
    arrays = {name: getattr(batch, name) for name, _ in batch._arrays()}
    if batch.token_versions is not None:
        arrays[_TOKEN_VERSIONS] = batch.token_versions
    arrays["step"] = np.array(batch.step, dtype=np.int64)
    # As bytes: without pickle an .npz holds arrays alone.
    stats = json.dumps(dict(batch.stats), allow_nan=False).encode()
    arrays["stats"] = np.frombuffer(stats, dtype=np.uint8)
    arrays["sha256"] = np.frombuffer(_digest(arrays), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    with atomic_open(path, "wb") as stream:
        stream.write(buffer.getbuffer())


def read_batch(path: Path) -> RolloutBatch:
    """Read what `write_batch` wrote; nothing in the file is executed.

    Raises:
        StorageError: unreadable, cut off or changed.
    """
    try:
        # Opened here: numpy leaves the file open when it is not a zip.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays: dict[str, Any] = {name: archive[name] for name in archive.files}
        written = arrays.pop("sha256").tobytes()
        if written != _digest(arrays):
            raise ValueError("its checksum does not match its content")
        stats = json.loads(arrays.pop("stats").tobytes())
        # An array of any other name is a TypeError here, and so refused.
        batch = RolloutBatch(step=int(arrays.pop("step")), stats=stats, **arrays)
        batch.check()  # a checksum only says that the file is as its writer left it
    except _DAMAGED as error:
        raise StorageError(f"rollout batch {path} cannot be used: {error}") from error
    return batch


def finite(stats: Mapping[str, float]) -> dict[str, float]:
    """`stats` without numbers that JSON and metrics have no form for."""
    return {name: float(value) for name, value in stats.items() if math.isfinite(value)}


def _digest(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        # The same bytes under another name or in another shape are another batch.
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.digest()
