"""Imported by every Python process of a stage that is debugged: see shakedown.debug.asked.

On PYTHONPATH it hides a sitecustomize of the machine or the user, which is run as well.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


def _run_hidden() -> None:
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry).resolve() != here]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if found is not None and found.loader is not None:
        found.loader.exec_module(importlib.util.module_from_spec(found))


_run_hidden()
try:
    from shakedown.debug.hook import install
except ImportError as error:  # another environment's Python
    print(f"shakedown: {sys.executable} cannot be debugged: {error}", file=sys.stderr)
else:
    install()
