"""Another user of this machine, and what is open to others."""

import subprocess
from pathlib import Path

NOBODY = 65534


def as_neighbour(*command: object) -> None:
    """Run a command as another user; only root can."""
    told = list(map(str, command))
    subprocess.run(told, check=True, user=NOBODY, group=NOBODY, extra_groups=[])


def open_to_others(root: Path, bits: int) -> list[str]:
    """Files and folders of a tree that have one of the mode's bits."""
    paths = [root, *root.rglob("*")]
    return [str(p) for p in paths if not p.is_symlink() and p.stat().st_mode & bits]
