"""Model and data files: readable on every node, and the same on each."""

import errno
import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from shakedown.preflight.check import Check, CheckJudgement, Fleet
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest

_LFS_POINTER = b"version https://git-lfs"
_BLOCK = 64 * 1024  # bytes
_BLOCKS = 16  # of each file: 1 MiB, so that smaller ones are read whole


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """For each given path: `files`, `bytes`, `digest` of names, sizes and blocks, or the
    `error`."""
    facts: dict[str, NodeFacts] = {}
    for text in request.want.paths:
        try:
            facts[text] = _read_tree(Path(text))
        except OSError as error:
            where = f" {error.filename}" if error.filename not in (None, text) else ""
            facts[text] = {"error": f"{error.strerror or error}{where}"}
    return {"paths": facts}


def _read_tree(path: Path) -> NodeFacts:
    names = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    if not names:
        raise OSError(errno.ENOENT, "contains no files")
    found = hashlib.sha256()
    total = 0
    for file in names:
        size = file.stat().st_size
        found.update(f"{file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as stream:
            for begin in sampled_blocks(size):
                stream.seek(begin)
                block = stream.read(_BLOCK)
                if begin == 0 and block.startswith(_LFS_POINTER):
                    raise OSError(errno.EINVAL, "a Git LFS pointer, not the file itself", str(file))
                found.update(block)
        total += size
    return {"files": len(names), "bytes": total, "digest": found.hexdigest()[:16]}


def sampled_blocks(size: int) -> list[int]:
    """The start of each block to read: the same on every node, including the first and last block.

    Reading a whole large model from a shared file system would take minutes. One block reveals a
    file whose bytes differ everywhere; one wrong block out of many is not found.
    """
    last = max(0, size - _BLOCK)
    return sorted({last * number // (_BLOCKS - 1) for number in range(_BLOCKS)})


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:  # noqa: ARG001
    """Model and data files must be readable."""
    broken = {path: row["error"] for path, row in facts["paths"].items() if "error" in row}
    if broken:
        remedy = "put the files where every node can read them"
        return CheckJudgement("fail", broken, "readable", "", "environment", remedy)
    read = {path: f"{row['files']} files, {row['bytes']} B" for path, row in facts["paths"].items()}
    return CheckJudgement("pass", read, "readable")


def compare(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """A given path must hold the same files on every node."""
    facts = fleet.facts("paths")
    found = {}
    for path in dict.fromkeys(path for row in facts.values() for path in row["paths"]):
        rows = {node: row["paths"].get(path, {}) for node, row in facts.items()}
        digests = {node: row["digest"] for node, row in rows.items() if "digest" in row}
        usual, count = Counter(digests.values()).most_common(1)[0] if digests else ("", 0)
        measured = f"{path}: names, sizes or bytes differ from {count} node(s)"
        for node in [n for n, digest in digests.items() if digest != usual]:
            expected, remedy = "the same files on every node", "copy the files again"
            found[node] = CheckJudgement("fail", measured, expected, "", "environment", remedy)
    return found


PATHS = Check(
    "paths",
    "a given path cannot be read, is empty, or is a Git LFS pointer",
    measure,
    judge,
    needs="paths",
    limit="every file is read in part",
    source="ours",
)
SAME_FILES = Check(
    "same_files",
    "a given path has different files on one node than on most",
    compare=compare,
    needs="paths",
    limit="equal names, sizes and 16 sampled blocks of 64 KiB per file",
    source="ours",
)
