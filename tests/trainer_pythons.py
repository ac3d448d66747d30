"""Pythons of trainers' environments, which shakedown does not need: this one, or those named.

SHAKEDOWN_RAY_PYTHON: with ray. SHAKEDOWN_TRAINERS_PYTHON: with torch, transformers, accelerate,
trl, lightning and tensorboard.
"""

import importlib.util
import os
import sys

import pytest

RAY_PYTHON = os.environ.get("SHAKEDOWN_RAY_PYTHON") or (
    sys.executable if importlib.util.find_spec("ray") else ""
)
needs_ray = pytest.mark.skipif(not RAY_PYTHON, reason="SHAKEDOWN_RAY_PYTHON names no Python")
TRAINERS_PYTHON = os.environ.get("SHAKEDOWN_TRAINERS_PYTHON", "")
needs_trainers = pytest.mark.skipif(
    not TRAINERS_PYTHON, reason="SHAKEDOWN_TRAINERS_PYTHON names no Python"
)
