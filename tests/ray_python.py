"""A Python with ray, which shakedown does not need: this one, or SHAKEDOWN_RAY_PYTHON."""

import importlib.util
import os
import sys

import pytest

RAY_PYTHON = os.environ.get("SHAKEDOWN_RAY_PYTHON") or (
    sys.executable if importlib.util.find_spec("ray") else ""
)
needs_ray = pytest.mark.skipif(not RAY_PYTHON, reason="SHAKEDOWN_RAY_PYTHON names no Python")
