"""Imported by each Python process below one that has `core.python_startup.environment`.

On PYTHONPATH it hides a sitecustomize of the machine or the user, so it runs that one first; the
requested files have the last word. It uses only the standard library, as the Python may belong to
an environment without this package.
"""

import importlib.machinery
import importlib.util
import os
import sys
import traceback
from pathlib import Path

_RAN = "shakedown_at_start"  # the hidden file may itself run the one that it hides


def _run_hidden() -> None:
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if found is not None and found.loader is not None:
        found.loader.exec_module(importlib.util.module_from_spec(found))


def _run(file: str) -> None:
    spec = importlib.util.spec_from_file_location(_RAN, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _run_all() -> None:
    if hasattr(sys, _RAN):
        return
    setattr(sys, _RAN, True)
    try:
        _run_hidden()
    finally:
        for file in filter(None, os.environ.get("SHAKEDOWN_AT_START", "").split(os.pathsep)):
            try:
                _run(file)
            except Exception:  # noqa: BLE001 - it must not end the program that it looks at
                traceback.print_exc()


_run_all()
