"""The random states of one rank in a checkpoint: torch, numpy and Python."""

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shakedown.core.errors import StorageError


def random_name(rank: int) -> str:
    """A rank's file in the checkpoint."""
    return f"rng-rank{rank}.pt"


def random_state() -> bytes:
    """Every generator that a step may draw from, as a file's content."""
    legacy: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        # Numpy's own arrays would need code to be loaded with them.
        "numpy": {**legacy, "state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()  # of the rank's own GPU alone
    buffer = io.BytesIO()  # torch.save hides what a file system says
    torch.save(state, buffer)
    return buffer.getvalue()


def load_random(path: Path) -> None:
    """Go on drawing from there; generators that an older checkpoint does not know go on as seeded.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        # weights_only: nothing in the file is executed.
        state: dict[str, Any] = torch.load(path, weights_only=True)
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if "python" in state:
            random.setstate(state["python"])
        if "numpy" in state:
            found = state["numpy"]
            key = np.array(found["state"]["key"], dtype=np.uint32)
            np.random.set_state({**found, "state": {**found["state"], "key": key}})
    # Exceptions of torch.load and the generators for a file that is cut off, changed or foreign.
    except (
        OSError,
        RuntimeError,
        KeyError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        raise StorageError(
            f"cannot read the random states {path}: {str(error).splitlines()[0]}",
            hint="remove that checkpoint: the one before it is used then",
        ) from error
