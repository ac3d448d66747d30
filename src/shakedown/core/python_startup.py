"""Files that every descendant Python process runs when it starts."""

import os
from collections.abc import Mapping
from pathlib import Path

_FILES = "SHAKEDOWN_AT_START"
# Python imports a module `sitecustomize` at its start, which also reaches torchrun's workers and an
# engine's processes.
_STARTUP = Path(__file__).with_name("startup")


def environment(file: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables, based on `environ`, that also make every process run `file`."""
    return {
        _FILES: _with(str(file), environ.get(_FILES, "")),
        "PYTHONPATH": _with(str(_STARTUP), environ.get("PYTHONPATH", "")),
    }


def _with(entry: str, path: str) -> str:
    others = [each for each in path.split(os.pathsep) if each not in ("", entry)]
    return os.pathsep.join([entry, *others])
