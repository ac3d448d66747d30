"""The results file system: does it accept files, and does it have space?"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from shakedown.core.private import make_folders
from shakedown.preflight.check import Check, CheckJudgement
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest

MAX_STEP_SECONDS = 1.0  # limit for a rename or a listing; heartbeats are renamed twice per second
MAX_DATA_SECONDS = 5.0  # limit for 4 MB: below 1 MB/s a checkpoint of a small model takes an hour
_SLOW = f"<= {MAX_STEP_SECONDS:g} s per step, <= {MAX_DATA_SECONDS:g} s to move 4 MB"
# Random, so that a compressing file system has to write all of it.
_SAMPLE = os.urandom(2**20)
_SAMPLE_COPIES = 4


def marker_folder(request: ProbeRequest) -> Path:
    """The folder for files that a run's nodes exchange; removed when the run ends."""
    return Path(request.out) / f".probe-{request.token}"


def measure(request: ProbeRequest, node: str) -> NodeFacts:
    """Write, fsync, rename, list, read back and remove 4 MB; `failed` names the step and errno."""
    folder = marker_folder(request)
    facts = {"folder": request.out, **_space(Path(request.out))}
    steps: dict[str, float] = {}
    try:
        make_folders(folder)
        target = folder / f"disk-{node}.tmp"
        for name, step in _steps(target, folder / f"disk-{node}").items():
            begin = time.monotonic()
            step()
            steps[name] = round(time.monotonic() - begin, 4)
    except OSError as error:
        step_name = next((n for n in _STEPS if n not in steps), "mkdir")
        facts["failed"] = {
            "step": step_name,
            "errno": errno.errorcode.get(error.errno or 0, "?"),
            "message": error.strerror or str(error),
        }
    return {**facts, "steps": steps}


_STEPS = ("write", "fsync", "rename", "list", "read", "remove")
_MOVES_DATA = {"write", "fsync", "read"}


def _steps(temporary: Path, final: Path) -> dict[str, Callable[[], None]]:
    def write() -> None:
        # Unbuffered, so that this step finds a full disk, not the closing of the file.
        with temporary.open("wb", buffering=0) as stream:
            for _ in range(_SAMPLE_COPIES):
                if stream.write(_SAMPLE) != len(_SAMPLE):
                    raise OSError(errno.ENOSPC, "short write")

    def fsync() -> None:
        handle = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def listed() -> None:
        if final.name not in os.listdir(final.parent):
            raise OSError(errno.ENOENT, "a renamed file is not listed")

    def read() -> None:
        if final.read_bytes() != _SAMPLE * _SAMPLE_COPIES:
            raise OSError(errno.EIO, "read back different bytes than were written")

    functions = (write, fsync, lambda: os.replace(temporary, final), listed, read, final.unlink)
    return dict(zip(_STEPS, functions, strict=True))


def _space(folder: Path) -> dict[str, object]:
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    seen = os.statvfs(existing)
    mounts = [
        (part.mountpoint, part.fstype)
        for part in psutil.disk_partitions(all=True)
        if existing.resolve().is_relative_to(part.mountpoint)
    ]
    return {
        # f_bavail, not f_bfree: ext4 reserves some blocks for root.
        "free_gb": round(seen.f_bavail * seen.f_frsize / 1e9, 3),
        "free_files": seen.f_favail if seen.f_files else None,
        # With nested mounts the longest path is the one that holds the folder.
        "type": max(mounts, key=lambda mount: len(mount[0]), default=("", ""))[1],
    }


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:
    """The results folder must accept a file, keep it, and have space."""
    expected = f">= {want.min_free_disk_gb:g}"
    failed = facts.get("failed")
    if failed:
        return CheckJudgement(
            "fail",
            f"{failed['step']}: {failed['errno']} {failed['message']}",
            "write, fsync, rename, list, read, remove",
            remedy=f"check {facts['folder']} on this node: df -h, df -i, quota, mount",
        )
    if facts["free_gb"] < want.min_free_disk_gb:
        remedy = f"free space under {facts['folder']}"
        return CheckJudgement("fail", facts["free_gb"], expected, "GB free", "environment", remedy)
    # File systems without a fixed number of inodes, such as btrfs, report 0.
    if facts["free_files"] is not None and 0 < facts["free_files"] < 10_000:
        return CheckJudgement("warn", facts["free_files"], ">= 10000", "free inodes", "environment")
    slow = {
        step: seconds
        for step, seconds in facts["steps"].items()
        if seconds > (MAX_DATA_SECONDS if step in _MOVES_DATA else MAX_STEP_SECONDS)
    }
    if slow:
        remedy = f"{facts['folder']} ({facts['type']}) is slow: choose another file system"
        return CheckJudgement("warn", slow, _SLOW, "s", "environment", remedy)
    return CheckJudgement("pass", facts["free_gb"], expected, "GB free")


FILES = Check(
    "files",
    "4 MB in the results folder fail to write, fsync, rename, list, read or remove; too "
    "little space; warns: few inodes left, a slow step",
    measure,
    judge,
    limit="`min_free_disk_gb`, 2 GB; 10000 inodes; 1 s per step, 5 s to move 4 MB",
    source="the demo run's results; ours",
)
