"""Recorded cases of the scoreboard: what a stage left for its diagnosis, to be replayed."""

import gzip
import io
import json
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from scoreboard_cases import Case, Result
from scoreboard_run import CaseError

from shakedown.core.files import atomic_open, json_as
from shakedown.core.paths import RunPaths
from shakedown.diagnosis.diagnose import newest_attempt

RESULT = "result.json"
# Far more than a stage of four ranks leaves; a case that needs more belongs on the scoreboard.
_MAX_BYTES = 400_000


def recording(folder: Path, case: Case) -> Path:
    """The file that holds a case."""
    return folder / (re.sub(r"\W+", "-", case.name) + ".tar.gz")


def record(case: Case, run: Path, out: Path) -> None:
    """Write what the diagnosis reads of a kept run, and its result, to a file in `out`.

    Paths of this machine are overwritten by others of the same length, so that no length that a
    pickle notes becomes wrong.

    Raises:
        CaseError: it is too large to be kept beside the code.
    """
    packed = io.BytesIO()
    # Without a name or a time: the same run gives the same bytes.
    with (
        gzip.GzipFile("", "wb", fileobj=packed, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as archive,
    ):
        for path in _files(case, run):
            data = _without_paths(path.read_bytes(), run)
            member = tarfile.TarInfo(str(path.relative_to(run)))
            member.size, member.mtime = len(data), int(path.stat().st_mtime)
            archive.addfile(member, io.BytesIO(data))
    if packed.tell() > _MAX_BYTES:
        raise CaseError(f"its recording of {packed.tell()} bytes is above {_MAX_BYTES}")
    with atomic_open(recording(out, case), "wb") as file:
        file.write(packed.getvalue())


def unpack(case: Case, recordings: Path, folder: Path) -> Result:
    """Lay a recorded run out in `folder` as `run_case` left it; its result of then."""
    with tarfile.open(recording(recordings, case)) as archive:
        archive.extractall(folder, filter="data")
    body = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    return json_as(Result, body, unknown="ignore")


def _files(case: Case, run: Path) -> Iterator[Path]:
    yield run / RESULT
    attempt = newest_attempt(RunPaths(run / "run").stage(case.algorithm))
    for part in (attempt.outcome, attempt.heartbeats, attempt.logs, attempt.evidence):
        found = sorted(part.rglob("*")) if part.is_dir() else [part]
        yield from (path for path in found if path.is_file())


def _without_paths(data: bytes, run: Path) -> bytes:
    here = {run.parent, Path(__file__).parents[1], Path(sys.prefix), Path(sys.base_prefix)}
    for path in sorted(map(str, here), key=len, reverse=True):
        data = data.replace(path.encode(), b"/" + b"x" * (len(path.encode()) - 1))
    return data
