"""Run by every Python process of a stage being debugged: see shakedown.debug.debug_settings."""

import sys

try:
    from shakedown.debug.breakpoint_hook import install
except ImportError as error:  # another environment's Python
    print(f"shakedown: {sys.executable} cannot be debugged: {error}", file=sys.stderr)
else:
    install()
