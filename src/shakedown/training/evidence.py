"""Collect a stalled attempt's evidence on every node while its processes still live."""

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from shakedown.cluster.ranks import srun_argv
from shakedown.errors import UsageError
from shakedown.hang.collect import Target, collect_local, from_attempt
from shakedown.hang.heartbeat import read_heartbeats
from shakedown.hang.watch import Health
from shakedown.paths import AttemptPaths

_SRUN_SECONDS = 120.0
_GAP_SECONDS = 2.0  # the watch has looked twice itself, 5 s apart


def collect_evidence(
    attempt: AttemptPaths, running: Mapping[str, int], health: Health, nodes: Sequence[str]
) -> None:
    """Sample all components twice and write everything to the attempt's `evidence/`.

    Never raises for what cannot be read: what was missed stands in `collected-<host>.json`.
    """
    print(f"stalled: {health.sentence}; collecting evidence in {attempt.evidence}", flush=True)
    others = {beat.host for beat in read_heartbeats(attempt.heartbeats)} - {socket.gethostname()}
    remote = _start_on_other_nodes(attempt, nodes) if others else None
    report = collect_local(
        _targets(attempt, running), attempt.evidence, logs=attempt.logs, gap=_GAP_SECONDS
    )
    missed = report.missed + [f"{t.name}: {m}" for t in report.targets for m in t.missed]
    if remote is not None:
        try:
            remote.wait(timeout=_SRUN_SECONDS)
        except subprocess.TimeoutExpired:
            remote.kill()
            missed.append(f"other nodes: srun did not end within {_SRUN_SECONDS:.0f} s")
    print(f"collected in {report.seconds:.1f} s, {len(missed)} thing(s) missed", flush=True)


def _targets(attempt: AttemptPaths, running: Mapping[str, int]) -> list[Target]:
    """Components with a heartbeat, and those that run without one (the inference server)."""
    try:
        targets = from_attempt(attempt.root)
    except UsageError:
        targets = []
    known = {target.pid for target in targets}
    for name, pid in running.items():
        if pid not in known:
            role, _, rank = name.partition("-rank")
            targets.append(Target(name, pid, role, int(rank) if rank.isdecimal() else None))
    return targets


def _start_on_other_nodes(
    attempt: AttemptPaths, nodes: Sequence[str]
) -> "subprocess.Popen[bytes] | None":
    """One collector a node through srun; a node that does not answer never stops the others."""
    step = srun_argv(
        nodes=nodes,
        tasks=len(nodes),
        output=attempt.evidence / "collect-%t.log",
        job_name="collect",
    )
    collect = [sys.executable, "-m", "shakedown.cli", "hang", "collect"]
    folders = ["--attempt", str(attempt.root), "--out", str(attempt.evidence)]
    gap = ["--gap", str(_GAP_SECONDS)]
    try:
        return subprocess.Popen([*step, *collect, *folders, *gap], stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"other nodes: srun could not be started: {error.strerror}", flush=True)
        return None
