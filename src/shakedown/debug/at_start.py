"""Run by every Python process of a stage that is debugged: see shakedown.debug.asked."""

import sys

try:
    from shakedown.debug.hook import install
except ImportError as error:  # another environment's Python
    print(f"shakedown: {sys.executable} cannot be debugged: {error}", file=sys.stderr)
else:
    install()
