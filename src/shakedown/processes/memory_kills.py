"""The number of processes that the kernel killed for memory in this process's cgroup and below it.

A killed process shows only SIGKILL; its cgroup counts the reason: `oom_kill` in `memory.events`
(cgroup v2, where children count too) or in `memory.oom_control` (v1, where each counts its own).
"""

import os
import re
from pathlib import Path

_ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
_FILES = ("memory.events", "memory.oom_control")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.M)
# Slurm's steps are cgroups of their own below their job's: `.../job_12/step_0/user/task_0`.
_JOB = re.compile(r"(.*/job_\d+)/.*")
_MOST_FOLDERS = 2000


def kills() -> int:
    """The count; 0 where no cgroup of memory can be read."""
    return sum(_count(folder) for folder in _folders(_own()))


def _own() -> list[Path]:
    """Candidate folders of this process's memory cgroup: the first that exists counts."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    fields = (line.split(":", 2) for line in lines)
    paths = {c: path for _, c, path in fields if "memory" in c.split(",") or not c}
    # v1 where it has memory, else v2, whose line names no controller.
    path = next((paths[c] for c in sorted(paths, reverse=True)), "/")
    match = _JOB.fullmatch(path)
    inside = (match[1] if match else path).lstrip("/")
    # In a container its own cgroup is the root.
    return [root / part for root in _ROOTS for part in dict.fromkeys((inside, ""))]


def _folders(candidates: list[Path]) -> list[Path]:
    """The cgroup; with v1 also those below it."""
    for folder in candidates:
        if (folder / _FILES[0]).is_file():
            return [folder]
        if (folder / _FILES[1]).is_file():
            walk = (Path(name) for name, _, _ in os.walk(folder))
            return [path for path, _ in zip(walk, range(_MOST_FOLDERS), strict=False)]
    return []


def _count(folder: Path) -> int:
    for name in _FILES:
        try:
            match = _COUNT.search((folder / name).read_text(encoding="utf-8"))
        except OSError:  # of the other version, or gone meanwhile
            continue
        if match:
            return int(match[1])
    return 0
