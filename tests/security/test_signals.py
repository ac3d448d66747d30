"""Numbers of processes that a stranger has by now: nobody is signalled by a number alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shakedown.cluster import roster
from shakedown.cluster.roster import Roster
from shakedown.cluster.supervise import Component, Supervisor
from shakedown.core.errors import RefusedError
from shakedown.core.files import write_json
from shakedown.core.lease import Holder
from shakedown.core.paths import EvidencePaths, ServerPaths
from shakedown.core.private import own_folder
from shakedown.inference.folder import ServerState
from shakedown.inference.server import stop
from shakedown.monitor.collect import hooked, proc
from shakedown.processes import guard
from shakedown.processes.identity import Recorded, boot_id
from shakedown.processes.workers import Worker
from shakedown.slurm.hostlist import node_name
from snakemake_executor_plugin_submitit import checkpoint, slurm

NOBODY = 65534
# Counts the signals that reach it; none ends it.
COUNTS = "trap 'echo hit' TERM USR1; echo ready; while :; do sleep 0.05; done"


class Stranger:
    """A process that leads a session of its own."""

    def __init__(self, user: str, script: str = "echo ready; exec sleep 60") -> None:
        drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        self.process = subprocess.Popen(
            [*(drop if user == "another user" else []), "sh", "-c", script],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        found = guard.look(self.process.pid)
        assert found is not None
        self.pid, self.started = found.pid, found.started

    @property
    def lives(self) -> bool:
        time.sleep(0.1)  # a signal takes effect a moment later
        return self.process.poll() is None

    def end(self) -> None:
        guard.send(guard.live_members({self.pid: self.started}), signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(params=["this user", "another user"])
def stranger(request: pytest.FixtureRequest) -> Iterator[Stranger]:
    """As root this test could end the other user's process too: only the check keeps it alive."""
    if request.param == "another user" and os.geteuid() != 0:
        pytest.skip("only root can start a process as another user")
    stranger = Stranger(request.param)
    yield stranger
    stranger.end()


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# --- a process that was recorded


def records(stranger: Stranger) -> list[Recorded]:
    """What may be written down of earlier processes that had this number."""
    return [
        Recorded(stranger.pid, stranger.started - 1, boot_id()),
        Recorded(stranger.pid, stranger.started, "before the machine started again"),
        Recorded(stranger.pid, stranger.started, ""),
        Recorded(stranger.pid, 0, boot_id()),
    ]


def test_a_recorded_number_that_a_stranger_has_by_now_is_not_signalled(stranger: Stranger) -> None:
    for record in records(stranger):
        record.send(signal.SIGKILL)
        assert not record.lives

    assert stranger.lives


def test_a_recorded_process_that_is_still_there_is_signalled(stranger: Stranger) -> None:
    record = Recorded.of(stranger.pid)
    assert record.lives

    record.send(signal.SIGKILL)

    assert stranger.process.wait(10) == -signal.SIGKILL
    assert not record.lives


@pytest.mark.parametrize("pid", [-1, 0])
def test_a_record_of_no_process_signals_no_group(pid: int, stranger: Stranger) -> None:
    """To kill(2), 0 is this process's own group and -1 everybody."""
    Recorded(pid, 0, boot_id()).send(signal.SIGKILL)

    assert stranger.lives


def test_without_pidfd_the_start_is_compared_all_the_same(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")

    for record in records(stranger):
        record.send(signal.SIGKILL)
    assert stranger.lives
    Recorded.of(stranger.pid).send(signal.SIGKILL)

    assert stranger.process.wait(10) == -signal.SIGKILL


# --- what a server's folder says


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerPaths:
    monkeypatch.setattr(roster, "_GUARD_SECONDS", 0.2)
    return ServerPaths(tmp_path)


def write_records(folder: ServerPaths, stranger: Stranger, **changes: Any) -> None:
    """A server and a daemon whose numbers the stranger has, with another start."""
    started, boot = changes.get("started", stranger.started - 1), changes.get("boot", boot_id())
    ServerState("running", node_name(), stranger.pid).write(folder.state)
    holder = replace(Holder.here("the daemon"), pid=stranger.pid, started=started, boot=boot)
    own_folder(folder.daemon / ".lease")
    write_json(folder.daemon / ".lease" / "1", asdict(holder))
    known = {str(stranger.pid): changes.get("server", started)}
    Roster((stranger.pid, started), known, boot=boot).write(folder.roster)


@pytest.mark.parametrize("boot", [boot_id(), "before the machine started again"])
def test_stop_leaves_a_stranger_who_has_the_servers_numbers(
    stranger: Stranger, folder: ServerPaths, boot: str
) -> None:
    started = stranger.started - (boot == boot_id())
    write_records(folder, stranger, started=started, boot=boot)

    assert stop(folder.root) == "was not running"
    assert stranger.lives


def test_stop_ends_a_server_that_its_daemon_has_left(folder: ServerPaths) -> None:
    server = Stranger("this user", "trap '' TERM; sleep 60 & echo ready; wait")
    write_records(folder, server, server=server.started)

    assert stop(folder.root) == "was not running"
    assert server.process.wait(10) == -signal.SIGKILL
    assert guard.members({server.pid}) == []
    server.end()


def test_a_session_whose_leader_is_gone_is_told_and_not_signalled(folder: ServerPaths) -> None:
    leader = Stranger("this user", "sleep 60 & echo ready; read line")
    write_records(folder, leader, server=leader.started)
    assert leader.process.stdin is not None
    leader.process.stdin.write(b"\n")
    leader.process.stdin.flush()
    leader.process.wait(10)
    (left,) = guard.members({leader.pid})

    with pytest.raises(RefusedError, match=f"processes {left} may be left over from a killed"):
        stop(folder.root)

    assert guard.members({leader.pid}) == [left]
    leader.end()


# --- the supervisor and its guard


def run_guard(line: str) -> None:
    subprocess.run(
        [sys.executable, "-I", "-S", guard.__file__, "0.2"],
        input=f"{line}\n".encode(),
        check=True,
        timeout=30,
    )


def test_a_guard_leaves_a_session_whose_leader_started_later(stranger: Stranger) -> None:
    run_guard(f"+{stranger.pid} {stranger.started - 1}")

    assert stranger.lives


def test_a_guard_ends_the_session_that_it_was_given(stranger: Stranger) -> None:
    run_guard(f"+{stranger.pid} {stranger.started}")

    assert stranger.process.wait(10) == -signal.SIGTERM


def test_an_ended_components_number_is_nobody_elses_while_its_session_has_a_member(
    tmp_path: Path,
) -> None:
    script = ("sh", "-c", "sleep 60 & exit 3")
    with Supervisor() as supervisor:
        pid = supervisor.start(Component("a", "test", script, tmp_path / "a.log"))
        until(lambda: not supervisor.running())
        (ended,) = supervisor.poll()
        leader = guard.look(pid)

        supervisor.stop_all(5)

        assert ended.returncode == 3
        assert leader is not None
        assert leader.ended
        assert guard.look(pid) is None
        supervisor.signal("a", signal.SIGKILL)  # to nobody: its number is anybody's now


def test_a_signal_that_may_not_be_sent_keeps_no_other_back(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A component may start a program that runs as another user."""
    own = Stranger("this user")

    def send(pid: int, started: int, signum: int) -> None:
        if pid == own.pid:
            raise PermissionError
        real(pid, started, signum)

    real = guard.send_one
    monkeypatch.setattr(guard, "send_one", send)
    both = guard.live_members({own.pid: own.started, stranger.pid: stranger.started})
    guard.send(sorted(both, key=lambda process: process.pid != own.pid), signal.SIGKILL)

    assert stranger.process.wait(10) == -signal.SIGKILL
    monkeypatch.undo()
    own.end()


# --- workers, hooks, jobs on nodes


def worker(pid: int) -> Worker:
    return Worker(SimpleNamespace(pid=pid, returncode=0), None, None)  # type: ignore[arg-type]


def test_an_ended_workers_number_is_not_another_sessions_group(stranger: Stranger) -> None:
    worker(stranger.pid).kill()

    assert stranger.lives


def test_an_ended_workers_number_is_not_a_later_group_of_this_session() -> None:
    later = subprocess.Popen(["sleep", "60"], process_group=0)
    ended = worker(later.pid)
    assert ended._leader is not None
    ended._leader -= 1

    ended.kill()
    time.sleep(0.1)
    lives = later.poll() is None
    worker(later.pid).kill()

    assert lives
    assert later.wait(10) == -signal.SIGKILL


@pytest.fixture
def counting() -> Iterator[Stranger]:
    stranger = Stranger("this user", COUNTS)
    yield stranger
    stranger.end()


def hits(counting: Stranger) -> bytes:
    time.sleep(0.3)
    guard.send(guard.live_members({counting.pid: counting.started}), signal.SIGKILL)
    said, _ = counting.process.communicate()
    return said


def test_no_stacks_are_asked_of_a_process_that_took_the_number(
    counting: Stranger, tmp_path: Path
) -> None:
    stream = tmp_path / "faulthandler-trainer-rank0.txt"
    stream.touch()
    start = counting.started - 1
    gone = hooked.Hook(counting.pid, start, "trainer-rank0", "trainer", 0, tmp_path, stream, False)

    dumps, lost = hooked.Stacks([gone]).dump([counting.pid])

    assert dumps == {}
    assert "No such process" in lost[counting.pid]
    assert hits(counting) == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user's")
def test_another_users_evidence_makes_nobody_signal_a_process(
    counting: Stranger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He names the process in a heartbeat, and makes the file that its hook would have made."""
    monkeypatch.setattr(proc, "visible", lambda _pid: False)
    stream = EvidencePaths(tmp_path).stacks("trainer-rank0")
    stream.touch()
    own = hooked.find_by_file(counting.pid, "trainer-rank0", tmp_path)

    os.chown(stream, NOBODY, NOBODY)

    assert own is not None
    assert hooked.find_by_file(counting.pid, "trainer-rank0", tmp_path) is None


def test_a_nodes_signals_reach_no_later_process(stranger: Stranger) -> None:
    later = checkpoint.CommandProcess(stranger.pid, stranger.started - 1)
    checkpoint.send(later, signal.SIGKILL)
    assert stranger.lives

    checkpoint.send(later._replace(started=stranger.started), signal.SIGKILL)

    assert stranger.process.wait(10) == -signal.SIGKILL


def test_a_slurm_programs_group_is_not_killed_once_it_was_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _number: killed.append(group))
    child = subprocess.Popen(["true"], start_new_session=True)
    until(lambda: (found := guard.look(child.pid)) is not None and found.ended)

    slurm._kill_group(child.pid)
    child.wait()
    slurm._kill_group(child.pid)

    assert killed == [child.pid]
