"""The results file system, whether nodes see each other's files, and the files a run reads."""

import errno
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from shakedown.core.private import make_folders
from shakedown.preflight.model import Facts, ProbeRequest, has_fault

# Random: a file system that compresses has to write all of it.
_SAMPLE = os.urandom(2**20)
_SAMPLE_COPIES = 4
_LFS_POINTER = b"version https://git-lfs"


def marker_folder(request: ProbeRequest) -> Path:
    """Where the nodes of one run leave files for each other; removed when the run ends."""
    return Path(request.out) / f".probe-{request.token}"


def files(request: ProbeRequest, node: str) -> Facts:
    """Write, fsync, rename, list, read back and remove 4 MB; `failed` names the step and errno."""
    folder = marker_folder(request)
    facts = {"folder": request.out, **_space(Path(request.out))}
    steps: dict[str, float] = {}
    try:
        make_folders(folder)
        target = folder / f"disk-{node}.tmp"
        if has_fault(request.faults, "no_disk", node):
            target.symlink_to("/dev/full")  # the kernel's own full device
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


def _steps(temporary: Path, final: Path) -> dict[str, Callable[[], None]]:
    def write() -> None:
        # Unbuffered: a full disk is met by this step, not by closing the file.
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
            raise OSError(errno.EIO, "read back other bytes than were written")

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
        # f_bavail, not f_bfree: ext4 keeps some blocks for root alone.
        "free_gb": round(seen.f_bavail * seen.f_frsize / 1e9, 3),
        "used_percent": round(100 * (1 - seen.f_bavail / seen.f_blocks), 1) if seen.f_blocks else 0,
        "free_files": seen.f_favail if seen.f_files else None,
        # Of nested mounts the longest path is the one that holds the folder.
        "type": max(mounts, key=lambda mount: len(mount[0]), default=("", ""))[1],
    }


def visibility(request: ProbeRequest, node: str) -> Facts:
    """Leave a file, then wait until every node's file can be read, its own among them.

    Every node runs this at the same time. `listed`: nodes whose file appeared only after the
    folder was listed (a cached "no such file", known from NFS).
    """
    folder = marker_folder(request)
    make_folders(folder)
    if not has_fault(request.faults, "invisible_file", node):
        temporary = folder / f".seen-{node}"
        temporary.write_text(request.token)
        temporary.replace(folder / f"seen-{node}")
    begin = time.monotonic()
    missing = {*request.addresses, node}
    seen: dict[str, float] = {}
    listed: list[str] = []
    # Not the whole limit: past it the check would be ended without an answer.
    while missing and time.monotonic() - begin < request.limit * 0.75:
        for other in sorted(missing):
            if _reads(folder / f"seen-{other}", request.token):
                seen[other] = round(time.monotonic() - begin, 3)
        missing -= seen.keys()
        # Not at once: listing the folder ends NFS's cached "no such file", which is to be found.
        if missing and time.monotonic() - begin > request.limit / 4:
            present = os.listdir(folder)
            listed += [o for o in missing if f"seen-{o}" in present and o not in listed]
        time.sleep(0.05 if missing else 0)
    return {"seen": seen, "missing": sorted(missing), "listed": sorted(set(listed) & set(seen))}


def _reads(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except OSError:
        return False


def paths(request: ProbeRequest, node: str) -> Facts:
    """Each given path: `files`, `bytes`, `digest` (of names and sizes), or the `error`."""
    facts: dict[str, Facts] = {}
    for text in request.paths:
        broken = has_fault(request.faults, "model_unreadable", node)
        try:
            facts[text] = _read_tree(Path("/nonexistent/fault" if broken else text))
        except OSError as error:
            where = f" {error.filename}" if error.filename not in (None, text) else ""
            facts[text] = {"error": f"{error.strerror or error}{where}"}
    return {"paths": facts}


def _read_tree(path: Path) -> Facts:
    """The first and last bytes of every file are read; a whole large model would take too long."""
    names = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    if not names:
        raise OSError(errno.ENOENT, "no files in it")
    found = hashlib.sha256()
    total = 0
    for file in names:
        size = file.stat().st_size
        with file.open("rb") as stream:
            if stream.read(4096).startswith(_LFS_POINTER):
                raise OSError(errno.EINVAL, "a Git LFS pointer, not the file itself", str(file))
            stream.seek(max(0, size - 4096))
            stream.read(4096)
        found.update(f"{file.relative_to(path)} {size}\n".encode())
        total += size
    return {"files": len(names), "bytes": total, "digest": found.hexdigest()[:16]}
