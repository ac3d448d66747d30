"""Start other people's kind of programs, look at each from outside, and judge the diagnosis.

    python scripts/live_programs.py [NAME...] [--split tune|held] [--times N] [--at-once N]

Plain torch.distributed programs of tests/data/live, started by torchrun or as they say; they know
nothing of shakedown. Each is looked at by `shakedown hang collect` once it does what it does, and
its evidence and its printed lines are diagnosed. Beside each `NAME.py` stands its truth, NAME.json,
as in tests/data/corpus. Every program ends by itself after five minutes.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from corpus import Score, judge, reliability, table

PROGRAMS = Path(__file__).parents[1] / "tests" / "data" / "live"
BIN = Path(sys.executable).parent


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    chosen = [
        (name, truth)
        for path in sorted(PROGRAMS.glob("*.json"))
        if (name := path.stem) in arguments.names or not arguments.names
        if arguments.split in ("", (truth := json.loads(path.read_text("utf-8"))).get("split"))
    ]
    scores = []
    with (
        tempfile.TemporaryDirectory(prefix="live-") as temporary,
        ThreadPoolExecutor(arguments.at_once) as pool,
    ):
        rows = [
            pool.submit(look_at, truth, Path(temporary) / f"{name}-{number}")
            for number in range(arguments.times)
            for name, truth in chosen
        ]
        for row in rows:
            scores.append(row.result())
            last = scores[-1]
            print(f"{last.case}: {last.answer}{last.innocents or ''}: {last.said}", flush=True)
    print(table(scores))
    print(reliability(scores))
    return 1 if any(score.innocents for score in scores) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="programs; all unless given")
    parser.add_argument("--split", choices=["", "tune", "held"], default="")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    return parser


def look_at(truth: dict[str, Any], folder: Path) -> Score:
    """Start one program, collect and diagnose it, end it; the score of the diagnosis."""
    evidence = folder / "input"
    evidence.mkdir(parents=True)
    logs = folder / "logs"
    logs.mkdir()
    command = [_argument(part, folder) for part in truth["launch"]]
    with (logs / "output.log").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=_with_programs(folder),
            env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        time.sleep(truth["begin_after"])
        _collect(folder, evidence, logs)
    finally:
        _end(process, folder)
    (folder / "truth.json").write_text(json.dumps(truth), encoding="utf-8")
    return judge(folder, truth)


def _argument(part: str, folder: Path) -> str:
    """An argument of the program's own launch line, with this run's paths."""
    part = part.replace("{python}", sys.executable)
    if "{port}" in part:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            part = part.replace("{port}", str(probe.getsockname()[1]))
    return str(folder / "logs") if "/live-logs/" in part else part


def _with_programs(folder: Path) -> Path:
    """A folder of its own: the pattern of `--match` finds this run's processes alone."""
    place = folder / "src"
    subprocess.run(["cp", "-r", str(PROGRAMS), str(place)], check=True)
    return place


def _collect(folder: Path, evidence: Path, logs: Path) -> None:
    pids = _pids_in(folder / "src")
    if pids:
        subprocess.run(
            [sys.executable, "-m", "shakedown.cli", "hang", "collect", "--pid", *pids, "--out",
             str(evidence), "--gap", "6"],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    subprocess.run(["cp", "-r", str(logs), str(evidence / "printed")], check=True)


def _pids_in(place: Path) -> list[str]:
    """Python processes that work in `place`, the launcher's own left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            inside = (path / "cwd").readlink() == place
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if inside and "torchrun" not in line and "torch.distributed" not in line:
            found.append(path.name)
    return sorted(found, key=int)


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """The launcher's session, and what it started in sessions of its own."""
    for signum in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
        for pid in {*_pids_in(folder / "src"), str(process.pid)}:
            try:
                os.kill(int(pid), signum)
            except ProcessLookupError:
                continue
        time.sleep(0.5)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
