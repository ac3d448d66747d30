"""Texts, HTML and lines of logs, each where a reader takes it up."""

import json
from collections.abc import Callable

EVIL = {
    "script": "<script zz>alert(1)</script>",
    "image": "<img zz src=x onerror=alert(1)>",
    "attribute": "\"><zz onmouseover=alert(1) x='",
    "style": "</style><zz onload=alert(1)>",
    "template": "{{ ''.__class__.__mro__ }}{% zz %}",
    "colours": "\x1b[2J\x1b[31m\x1b]0;zz\x07",
    "directions": "\u202ezz\u2066\u2069\u200f",
    "controls": "\x9b31mzz\x85\x08\x7f\x00",
}


def texts() -> dict[str, bytes]:
    """70 files: 8 hostile words in 5 places, and 30 that are made to be slow."""
    words = {
        f"{place} {name}": make(word).encode()
        for place, make in _PLACES.items()
        for name, word in EVIL.items()
    }
    found = {**words, **_slow()}
    assert len(found) == 70
    return found


def _log(word: str) -> str:
    return f"[rank0]: {word}\n[rank0]: ValueError: {word}\n{word}: Broken pipe {word}\n"


def _stack(word: str) -> str:
    frames = f"    {word} ({word}/train.py:4)\n    main (/srv/train.py:9)\n"
    return f'Process 41: python {word}\nThread 41 (idle): "MainThread"\n{frames}'


def _traceback(word: str) -> str:
    frame = f'  File "/srv/{word}.py", line 3, in f\n    {word}\n'
    return f"Traceback (most recent call last):\n{frame}RuntimeError: {word}\n"


def _slurm(word: str) -> str:
    return f"NodeName={word.replace(' ', '_')} State=DOWN\nJobId=1{word}\n   JobState=NODE_FAIL\n"


def _dump(word: str) -> str:
    entry = {
        "record_id": 1, "process_group": ["0", word], "collective_seq_id": 1,
        "profiling_name": f"nccl:{word}", "frames": [{"name": word, "filename": word, "line": 1}],
    }  # fmt: skip
    config = {"0": {"desc": word, "ranks": "[0, 1]"}}
    return json.dumps({"version": word, "entries": [entry], "pg_config": config, "rank": 0})


_PLACES: dict[str, Callable[[str], str]] = {
    "log": _log, "stack": _stack, "traceback": _traceback, "slurm": _slurm, "dump": _dump,
}  # fmt: skip


def _slow() -> dict[str, bytes]:
    """Lines on which a pattern could go back for hours, and texts of a megabyte and more."""
    long, lines = 3900, 250
    rows = {
        "rules": "=" * 600 + "x y" * 80,
        "blanks": "rank 3" + " " * long + "x",
        "threads": "Thread: " + " " * long + '"x',
        "thread names": 'Thread 0x1 (idle): "' + '"' * long,
        "brackets": "[rank0]:" * 480,
        "pods": "[pod/a] " * 480,
        "local": "[default1]:" * 350,
        "mismatch": (
            "Detected mismatch between collectives on ranks. Rank 1 is running collective: "
            + ", but Rank 2 is running" * 150
        ),
        "watchdog": "[PG ID 0 PG GUID 0(default_pg) Rank 5] last enqueued work: " * 60,
        "desync": "[" + "1, " * 1300 + "finished collective #",
        "staleness": "staleness off-policy " * 180,
        "server": "server health check EngineCore " * 120,
        "weights": "waiting for weights checkpoint " * 120,
        "frames": "    a (" * 600,
        "file lines": '  File "' + '"a, line 1 in ' * 280,
        "pystack": '    (Python) File "a", line 1, in ' + "( " * 1900,
        "communicators": "#0-0 (" + "a" * long,
        "missing": "#0-0 (aa) INCOMPLETE\nThe missing ranks: " + "1-9999999, " * 36,
        "operations": "Rank 1 has launched up to operation " * 100,
        "nodes": "NodeName=a State=" * 220,
        "sacct": "JobID|" * 600 + "State",
        "stamps": "2026-01-01 10:00:00 " * 190,
        "steps": "2026-01-01 10:00:00 step step step 1" * 100,
        "speeds": "step_time: 1" * 300,
        "errors": "a." * 1900 + "Error",
        "ssh": "ssh: connect to host a port 22: " * 120,
        "exits": "rank : 1 (local_rank: 1) exitcode : 1 (pid: 1) Root Cause" * 60,
    }
    whole = {
        "no line": b"A" * 2**21,
        "utf-16": b"\xff\xfe" + "Broken pipe\n".encode("utf-16-le") * 20_000,
        "colours": b"\x1b[" + b"0;" * 2**19 + b"m",
    }
    made = {name: (row + "\n").encode() * lines for name, row in rows.items()}
    return {f"slow: {name}": data for name, data in {**made, **whole}.items()}
