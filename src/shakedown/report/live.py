"""A stage under way, from its files alone: speed, time left, checkpoint, who is silent."""

import json
import math
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shakedown.core.paths import AttemptPaths, StagePaths
from shakedown.core.rows import JsonLines, JsonRow, by_step, has_step
from shakedown.debug.paused_processes import PausedProcess, describe, read_stops
from shakedown.monitor.heartbeat import host_name, read_heartbeats
from shakedown.processes.guard import look as look_up
from shakedown.progress.patience import RECENT, WARN_SHARE, Patience, kind_of
from shakedown.progress.signs import Beat
from shakedown.report import text
from shakedown.report.reader import LONGEST, MAX_WHOLE, finite, longest_step, patience_of

_TAIL_BYTES = 256 << 10  # of metrics.jsonl, however long: `RECENT` rows of a dozen KB
_STALE_ROWS = 10.0  # usual rows without a new one after which no time left is told
_LATEST = 1e11  # Unix seconds: a time beyond is damage
_SKEW = 5.0  # seconds that clocks of nodes may differ
GONE_SECONDS = 10.0  # a component that beat since then lives, whatever the process table says
_KEYS = {"step": "stall_timeout", "phase": "start_timeout"}
_CHECKPOINT = re.compile(r"step_(\d{1,15})")


@dataclass(frozen=True)
class LiveJob:
    """Of the attempt: the patience of its watch, and its trainer ranks.

    `foreign`: a trainer that is a command, whose checkpoints have names of its own. `ray`: address,
    first node and dashboard's port of its Ray cluster; empty without one.
    """

    patience: Patience
    ranks: int = 0
    foreign: bool = False
    ray: tuple[str, str, int] | None = None


@dataclass(frozen=True)
class Live:
    """A stage's newest attempt now. Ages in seconds; `rows` are the last ones, oldest first.

    `stops` are processes that stand for a debugger: nobody is warned of silence then.
    `checkpoint` is (step, age) of the newest one; `speed` in steps/s over the last rows, with
    checkpoints and evaluations; `left` in seconds, None where nobody can tell. `gone`: components
    whose process has ended on this host.
    """

    name: str
    attempt: int
    steps: int | None
    rows: Sequence[Mapping[str, float]] = ()
    row_age: float | None = None
    checkpoint: tuple[int, float] | None = None
    beats: Sequence[Beat] = ()
    speed: float | None = None
    left: float | None = None
    stops: Sequence[PausedProcess] = ()
    warnings: Sequence[str] = field(default_factory=list)
    gone: Sequence[Beat] = ()
    foreign: bool = False
    ray: tuple[str, str, int] | None = None

    @property
    def last(self) -> Mapping[str, float]:
        return self.rows[-1] if self.rows else {}


def look(paths: StagePaths, number: int, steps: int | None, now: float) -> Live:
    """Read what the attempt `number` has written; nothing that is broken is an error.

    Args:
        steps: planned.
        now: Unix seconds.
    """
    attempt = paths.attempt(number)
    rows, changed = last_rows(paths.metrics)
    beats = [b for b in read_heartbeats(attempt.heartbeats) if abs(b.wall) < _LATEST]
    lost = gone(beats, now)
    age = None if changed is None or not rows else max(0.0, now - changed)
    speed = steps_per_second(rows)
    stops, job = read_stops(attempt.debug), read_job(attempt)
    return Live(
        name=paths.root.name,
        attempt=number,
        steps=steps,
        rows=rows,
        row_age=age,
        checkpoint=newest_checkpoint(paths.checkpoints, now),
        beats=beats,
        speed=speed,
        left=time_left(rows, steps, speed, age),
        stops=stops,
        warnings=[] if stops else warnings(beats, job, now, lost, longest_step(rows)),
        gone=lost,
        foreign=job.foreign,
        ray=job.ray,
    )


def gone(beats: Iterable[Beat], now: float) -> list[Beat]:
    """Of silent components on this host those whose process is not there any more.

    A process that began after the beat has only got its number. Programs in a container of the
    host's name have numbers of their own; they are not looked for while they beat.
    """
    here = host_name()
    silent = [b for b in beats if b.host == here and now - b.wall > GONE_SECONDS]
    return [beat for beat in silent if beat.phase != "finished" and not _lives(beat, now)]


def _lives(beat: Beat, now: float) -> bool:
    process = look_up(beat.pid)
    if process is None or process.ended:
        return False
    up = time.clock_gettime(time.CLOCK_BOOTTIME)  # `started` counts from the same moment
    age = up - process.started / os.sysconf("SC_CLK_TCK")
    return now - age < beat.wall + _SKEW


def steps_per_second(rows: Sequence[Mapping[str, float]]) -> float | None:
    """Over the last twenty rows; None without their times."""
    taken = [row.get("step_seconds", 0.0) for row in rows[-RECENT:]]
    seconds = [value for value in taken if 1 / LONGEST < value < LONGEST]
    return len(seconds) / math.fsum(seconds) if seconds else None


def time_left(
    rows: Sequence[Mapping[str, float]],
    steps: int | None,
    speed: float | None,
    row_age: float | None,
) -> float | None:
    """Seconds to the last step at the present speed; None when ten rows are overdue.

    A trainer may log one step of fifty: between two rows time passes, and steps are made.
    """
    if not rows or not steps or not speed or row_age is None:
        return None
    between = (rows[-1]["step"] - rows[0]["step"]) / max(len(rows) - 1, 1)
    if row_age * speed > _STALE_ROWS * max(between, 1.0):
        return None
    left = max(0.0, steps - rows[-1]["step"]) / speed
    made = row_age if between > 1 else 0.0
    return max(0.0, left - made) if left < LONGEST else None


def warnings(
    beats: Iterable[Beat],
    job: LiveJob,
    now: float,
    lost: Collection[Beat] = (),
    longest: float = 0.0,
) -> list[str]:
    """Components that were silent for half of what counts as a stall, or have not begun.

    Args:
        lost: those whose process has ended.
        longest: seconds of the longest of the last steps.
    """
    found, seen = [], set()
    for beat in beats:
        seen.add(beat.name)
        age = now - beat.wall
        if beat.phase == "finished":
            continue
        if beat in lost:
            found.append(
                f"{beat.name} is dead: process {beat.pid} is gone from {beat.host}, its last beat "
                f"was {text.duration(age)} ago in phase {beat.phase} at step {beat.step}"
            )
            continue
        kind = kind_of(beat.phase)
        allowed, usual = job.patience.of(kind, longest), job.patience.of(kind)
        if age > WARN_SHARE * allowed:
            raised = f", raised to {allowed:.0f} s by its steps" if allowed > usual else ""
            found.append(
                f"{beat.name} has been silent for {text.duration(age)} in phase {beat.phase} at "
                f"step {beat.step} ({_KEYS[kind]} is {usual:g} s{raised})"
            )
        elif age < -_SKEW:
            found.append(f"the clock of {beat.host} is {text.duration(-age)} ahead of this one")
    missing = [f"trainer-rank{r}" for r in range(job.ranks) if f"trainer-rank{r}" not in seen]
    if missing and seen:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        found.append(f"no heartbeat yet of {', '.join(missing[:4])}{more}")
    return found


def last_rows(path: Path) -> tuple[list[dict[str, float]], float | None]:
    """The newest rows of metrics.jsonl, numbers alone, and when it changed (Unix seconds)."""
    lines = JsonLines(path, fits=has_step, tail=_TAIL_BYTES)
    try:
        rows = [_numbers(row) for row in by_step(lines).values()]
        return rows[-RECENT:], path.stat().st_mtime
    except OSError:
        return [], None


def newest_checkpoint(folder: Path, now: float) -> tuple[int, float] | None:
    """(step, age in seconds) of the newest whole checkpoint."""
    try:
        names = [(int(m[1]), p) for p in folder.iterdir() if (m := _CHECKPOINT.fullmatch(p.name))]
        step, path = max(names)
        return step, max(0.0, now - path.stat().st_mtime)
    except (OSError, ValueError):  # none yet, or gone meanwhile
        return None


def read_job(attempt: AttemptPaths) -> LiveJob:
    """From the attempt's job.json; the defaults where it cannot be read."""
    try:
        body = json.loads(attempt.job.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        body = None
    config = body.get("config") if isinstance(body, dict) else None
    if not isinstance(config, dict):
        return LiveJob(Patience())
    ranks = body.get("world_size")
    return LiveJob(
        patience_of(config),
        ranks if isinstance(ranks, int) and 0 < ranks < 1 << 20 else 0,
        config.get("algorithm") == "command",
        _ray(body.get("ray")),
    )


# What may stand in a command that is shown to be pasted.
_ADDRESS, _NODE = re.compile(r"[\w.:\[\]-]{1,100}"), re.compile(r"\w[\w.-]{0,99}")


def _ray(told: object) -> tuple[str, str, int] | None:
    """The cluster that an attempt's job.json tells of; None for anything else."""
    if not isinstance(told, dict):
        return None
    address, node, port = (told.get(name) for name in ("address", "node", "dashboard"))
    if not isinstance(address, str) or not isinstance(node, str) or not isinstance(port, int):
        return None
    whole = _ADDRESS.fullmatch(address) and _NODE.fullmatch(node) and 0 < port < 1 << 16
    return (address, node, port) if whole else None


def lines(live: Live) -> list[str]:
    """A few lines for a terminal; the caller sees to what cannot be printed."""
    found = [f"{live.name}, attempt {live.attempt:03d}: {_pace(live)}"]
    for told in (_figures(live.last), _saved(live)):
        if told:
            found.append(f"  {told}")
    if live.ray:
        address, node, port = live.ray
        found.append(f"  ray: {address} on {node}, whose dashboard (ray[default]) comes by")
        found.append(f"    ssh -L 8265:127.0.0.1:{port} {node}   to http://127.0.0.1:8265")
        found.append(f"    which asks for the token in stages/{live.name}/latest/secret")
    found += [f"  stands: {describe(stop)}" for stop in live.stops]
    return found + [f"  warning: {warning}" for warning in live.warnings]


def as_json(live: Live, now: float) -> dict[str, Any]:
    """The same for programs."""
    step, age = live.checkpoint or (None, None)
    return {
        "attempt": live.attempt,
        "step": int(live.last["step"]) if live.last else None,
        "steps": live.steps,
        "steps_per_second": live.speed,
        "seconds_left": live.left,
        "row_age": live.row_age,
        "metrics": {key: value for key, value in live.last.items() if key != "step"},
        "checkpoint": {"step": step, "age": age},
        "components": [
            {
                "name": beat.name,
                "host": beat.host,
                "phase": beat.phase,
                "step": beat.step,
                "micro_batch": beat.micro_batch,
                "age": round(now - beat.wall, 3),
            }
            for beat in live.beats
        ],
        "stops": [
            {"name": s.name, "node": s.node, "pid": s.pid, "file": s.file, "line": s.line}
            for s in live.stops
        ],
        "warnings": list(live.warnings),
        "ray": dict(zip(("address", "node", "dashboard"), live.ray, strict=True))
        if live.ray
        else None,
    }


def _pace(live: Live) -> str:
    if not live.rows:
        return "before its first step"
    total = f" of {live.steps:,}" if live.steps else ""
    words = [f"step {int(live.last['step']):,}{total}"]
    if live.speed is not None:
        words.append(f"{text.number(live.speed)} steps/s")
    if live.left is not None:
        words.append(f"about {text.duration(live.left)} left")
    if live.row_age is not None:
        words.append(f"last row {text.duration(live.row_age)} ago")
    return ", ".join(words)


def _figures(row: Mapping[str, float]) -> str:
    words = []
    for key, label in (
        ("loss", "loss"),
        ("reward_mean", "reward"),
        ("staleness_mean", "staleness mean"),
        ("staleness_max", "max"),
        ("tokens_per_second", "tok/s"),
        ("memory_max_gb", "memory GiB"),
    ):
        if key in row:
            words.append(f"{label} {text.number(row[key])}")
    shares = (("idle_share", "trainer idle"), ("mfu", "MFU"))
    return ", ".join(words + [f"{label} {row[key]:.0%}" for key, label in shares if key in row])


def _saved(live: Live) -> str:
    if live.checkpoint is None:
        return "" if live.foreign else "no checkpoint yet"
    step, age = live.checkpoint
    return f"checkpoint of step {step:,}, {text.duration(age)} ago"


def _numbers(row: JsonRow) -> dict[str, float]:
    return {name: number for name, cell in row.items() if (number := _number(cell)) is not None}


def _number(value: object) -> float | None:
    """A finite number; an integer beyond what a float counts exactly is damage."""
    found = finite(value)
    return None if isinstance(value, int) and abs(value) > MAX_WHOLE else found
