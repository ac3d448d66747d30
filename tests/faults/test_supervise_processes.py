"""Real processes die, hang, ignore signals and lose their supervisor; none may be left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shakedown.cluster.supervise import Component, Supervisor
from shakedown.processes.guard import members, processes

STUBBORN = "trap '' TERM; echo ready; while :; do sleep 1; done"


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def shell(name: str, folder: Path, script: str) -> Component:
    return Component(name, "test", ("bash", "-c", script), folder / f"{name}.log")


def ready(folder: Path, name: str) -> Callable[[], bool]:
    return lambda: "ready" in (folder / f"{name}.log").read_text()


def test_a_killed_component_is_reported_and_its_siblings_go_on(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        victim = supervisor.start(shell("victim", tmp_path, "sleep 60"))
        supervisor.start(shell("sibling", tmp_path, "sleep 60"))

        os.kill(victim, signal.SIGKILL)
        until(lambda: "victim" not in supervisor.running())

        (ended,) = supervisor.poll()
        assert (ended.component.name, ended.returncode) == ("victim", -signal.SIGKILL)
        assert list(supervisor.running()) == ["sibling"]


def test_a_component_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        pid = supervisor.start(shell("stubborn", tmp_path, STUBBORN))
        until(ready(tmp_path, "stubborn"))

        (ended,) = supervisor.stop_all(0.3)

        assert ended.returncode == -signal.SIGKILL
        assert members({pid}) == []


def test_a_stopped_component_takes_sigterm(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        supervisor.start(shell("stopped", tmp_path, "echo ready; exec sleep 60"))
        until(ready(tmp_path, "stopped"))
        supervisor.signal("stopped", signal.SIGSTOP)

        (ended,) = supervisor.stop_all(20)

        assert ended.returncode == -signal.SIGTERM


def test_grandchildren_end_also_in_a_group_of_their_own(tmp_path: Path) -> None:
    script = "set -m; sleep 60 & sleep 60 & echo ready; wait"
    with Supervisor() as supervisor:
        pid = supervisor.start(shell("parent", tmp_path, script))
        until(ready(tmp_path, "parent"))
        assert len(members({pid})) == 3

        supervisor.stop_all(5)

        assert members({pid}) == []


# A child that leads a session of its own, as torchrun's workers do.
ESCAPES = (
    "import subprocess, sys; "
    "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'; "
    "subprocess.Popen([sys.executable, '-c', code], start_new_session=True)"
)


def test_a_foreign_component_s_descendants_end_also_in_a_session_of_their_own(
    tmp_path: Path,
) -> None:
    argv = (sys.executable, "-c", f"{ESCAPES}; import time; time.sleep(60)")
    log = tmp_path / "foreign.log"
    with Supervisor(grace=1.0) as supervisor:
        supervisor.start(Component("foreign", "test", argv, log, foreign=True))
        until(lambda: log.read_text().strip())
        escaped = int(log.read_text())
        assert escaped in {process.pid for process in supervisor.members("foreign")}

    assert escaped not in {process.pid for process in processes()}


def test_what_escaped_from_a_foreign_component_is_ended_after_a_killed_supervisor(
    tmp_path: Path,
) -> None:
    log = tmp_path / "foreign.log"
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from shakedown.cluster.supervise import Component, Supervisor\n"
        "with Supervisor(grace=1.0) as s:\n"
        "    argv = (sys.executable, '-c', sys.argv[1] + '; import time; time.sleep(60)')\n"
        "    s.start(Component('foreign', 'test', argv, Path(sys.argv[2]), foreign=True))\n"
        "    time.sleep(60)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program, ESCAPES, str(log)])
    until(lambda: log.exists() and log.read_text().strip())
    escaped = int(log.read_text())

    supervisor.kill()
    supervisor.wait()

    until(lambda: escaped not in {process.pid for process in processes()})


def test_descendants_of_a_component_that_ended_itself_are_ended(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        pid = supervisor.start(shell("parent", tmp_path, "sleep 60 & exit 0"))
        until(lambda: not supervisor.running())
        supervisor.poll()
        assert len(members({pid})) == 1

        supervisor.stop_all(5)

        assert members({pid}) == []


def test_descendants_are_ended_also_after_a_restart_under_the_same_name(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        first = supervisor.start(shell("parent", tmp_path, "sleep 60 & exit 1"))
        until(lambda: not supervisor.running())
        supervisor.start(shell("parent", tmp_path, "exit 0"))

        supervisor.stop_all(5)

        assert members({first}) == []


def test_leaving_the_block_by_an_exception_ends_all(tmp_path: Path) -> None:
    pids: list[int] = []

    def fail() -> None:
        with Supervisor(grace=1) as supervisor:
            pids.append(supervisor.start(shell("a", tmp_path, "sleep 60")))
            raise RuntimeError("the trainer failed")

    with pytest.raises(RuntimeError, match="the trainer failed"):
        fail()

    assert members(set(pids)) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_component_outlives_a_killed_supervisor(tmp_path: Path, number: int) -> None:
    program = f"""
import sys, time
from pathlib import Path
from shakedown.cluster.supervise import Component, Supervisor
with Supervisor(grace=0.3) as supervisor:
    script = "sleep 60 & {STUBBORN}"
    pid = supervisor.start(Component("a", "test", ("bash", "-c", script), Path(sys.argv[1])))
    print(pid, flush=True)
    time.sleep(60)
"""
    log = tmp_path / "a.log"
    supervisor = subprocess.Popen(
        [sys.executable, "-c", program, str(log)], stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    until(lambda: log.exists() and "ready" in log.read_text())
    assert len(members({pid})) >= 2

    supervisor.send_signal(number)
    supervisor.wait()
    supervisor.stdout.close()

    until(lambda: not members({pid}))


def test_a_killed_guard_does_not_stop_the_run(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        guard = supervisor._guard
        assert guard is not None
        guard.kill()
        guard.wait()

        supervisor.start(shell("a", tmp_path, "exit 0"))
        until(lambda: not supervisor.running())

        assert [e.returncode for e in supervisor.poll()] == [0]
