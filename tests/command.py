"""The `shakedown` command, as a user runs it."""

import subprocess
import sys
from collections.abc import Mapping


def shakedown(
    *arguments: object, env: Mapping[str, str] | None = None, umask: int = -1
) -> subprocess.CompletedProcess[str]:
    """`umask`: of the process; -1 leaves this one's."""
    return subprocess.run(
        [sys.executable, "-m", "shakedown.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=env,
        umask=umask,
    )
