"""A stage from its beginning again, with what it reached so far kept."""

import os
from pathlib import Path

from shakedown.core.folders import storage_errors
from shakedown.core.paths import StagePaths
from shakedown.core.private import make_folders, make_private_tree

# Checkpoints go first: after a kill right here the stage still starts from its beginning.
_RESULTS = (
    "checkpoints",
    "outcome",
    "accepted",
    "verdict",
    "diagnosis",
    "diagnosis_html",
    "metrics",
    "provenance",
    "export",
    "rollouts",
    "tensorboard",
    "wandb",
)


def set_aside(paths: StagePaths) -> Path | None:
    """Move all that the stage reached below its newest attempt; None: it has none.

    Raises:
        StorageError: the results folder cannot be changed.
        UntrustedError: others can change it.
    """
    numbers = paths.attempt_numbers()
    if not numbers:
        return None
    make_private_tree(paths.checkpoints)
    kept = paths.attempt(numbers[-1]).replaced
    with storage_errors("set aside", paths.root):
        for name in _RESULTS:
            _move(getattr(paths, name), kept)
        # The curve of the new start must not go on from the old one's points.
        for number in numbers:
            attempt = paths.attempt(number)
            _move(attempt.evals, attempt.replaced)
    return kept


def _move(path: Path, folder: Path) -> None:
    if not os.path.lexists(path):
        return
    make_folders(folder)
    path.rename(_free(folder / path.name))


def _free(path: Path) -> Path:
    """A name that nothing has: the attempt may have been set aside before, in part."""
    found, number = path, 1
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}.{number}")
    return found
