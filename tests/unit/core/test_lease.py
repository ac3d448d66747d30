"""One process writes a folder: a second one is told of it, and one that is gone hinders nobody."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shakedown.core.errors import RefusedError
from shakedown.core.lease import Fence, Holder, hold, holder_of
from shakedown.processes.guard import look

CONTENDER = """
import sys
from pathlib import Path
from shakedown.core.errors import RefusedError
from shakedown.core.lease import hold
sys.stdin.readline()
try:
    with hold(Path(sys.argv[1]), "a contender") as fence:
        print("held", fence.number, flush=True)
        sys.stdin.readline()
except RefusedError as error:
    print("refused", str(error).replace("\\n", " "), flush=True)
"""
Race = Callable[[int], tuple[subprocess.Popen[str], str, list[str]]]


@pytest.fixture
def race(tmp_path: Path) -> Iterator[Race]:
    """Processes that want the folder at the same moment: who got it, its line, the others'."""
    begun: list[subprocess.Popen[str]] = []

    def run(number: int) -> tuple[subprocess.Popen[str], str, list[str]]:
        command = [sys.executable, "-c", CONTENDER, str(tmp_path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        these = [subprocess.Popen(command, text=True, **pipes) for _ in range(number)]  # type: ignore[call-overload]
        begun.extend(these)
        for each in these:
            each.stdin.write("go\n")
            each.stdin.flush()
        said = {each: each.stdout.readline().strip() for each in these}
        ((winner, line),) = [pair for pair in said.items() if pair[1].startswith("held")]
        return winner, line, [line for each, line in said.items() if each is not winner]

    yield run
    for each in begun:
        each.kill()
        each.communicate()


def test_of_many_at_once_one_holds_the_folder_and_the_others_name_it(race: Race) -> None:
    winner, line, others = race(6)

    assert line == "held 1"
    assert all(f"a contender (pid {winner.pid} on " in other for other in others)
    assert all(f"kill {winner.pid}" in other for other in others)


def test_after_kill_9_one_of_many_takes_over_with_a_higher_number(
    race: Race, tmp_path: Path
) -> None:
    first, _, _ = race(1)
    first.send_signal(signal.SIGSTOP)
    with pytest.raises(RefusedError, match=f"pid {first.pid}"), hold(tmp_path, "too early"):
        pass
    first.send_signal(signal.SIGKILL)
    first.wait()

    _, line, others = race(6)

    assert line == "held 2"
    assert len(others) == 5
    with pytest.raises(RefusedError, match="number 2, this one's was 1"):
        Fence(tmp_path, 1).check()


def test_a_holder_that_ends_leaves_the_folder_to_the_next(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        with hold(tmp_path, "each in turn") as fence:
            fence.check()
            assert fence.number == number
    assert sorted(os.listdir(tmp_path / ".lease")) == ["2.released", "3.released"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a space of process ids")
def test_of_two_containers_on_one_host_each_takes_the_others_holder_for_alive(
    tmp_path: Path,
) -> None:
    """Each is process 1 or so of its own: their numbers, even their starts, may be the same."""
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*inside, sys.executable, "-c", CONTENDER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    first = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    try:
        first.stdin.write("go\n")
        first.stdin.flush()
        assert first.stdout.readline() == "held 1\n"

        second = subprocess.run(command, input="go\n", text=True, capture_output=True, check=True)
        with pytest.raises(RefusedError, match="not proven to be gone"), hold(tmp_path, "outside"):
            pass

        assert second.stdout.startswith("refused")
        assert "a contender (pid 1 on " in second.stdout
        assert "not proven to be gone" in second.stdout
        assert holder_of(tmp_path) is not None
        assert os.listdir(tmp_path / ".lease") == ["1"]
    finally:
        first.communicate("end\n")
    assert os.listdir(tmp_path / ".lease") == ["1.released"]


def test_who_waits_comes_after_the_holder_and_not_after_a_silent_one(
    race: Race, tmp_path: Path
) -> None:
    first, _, _ = race(1)
    os.utime(tmp_path / ".lease" / "1", (1, 1))
    with (
        pytest.raises(RefusedError, match=f"pid {first.pid}"),
        hold(tmp_path, "second", wait=True),
    ):
        pass
    os.utime(tmp_path / ".lease" / "1")

    def end() -> None:
        assert first.stdin is not None
        first.stdin.write("end\n")
        first.stdin.flush()

    threading.Timer(1.0, end).start()
    with hold(tmp_path, "second", wait=True) as fence:
        assert fence.number == 2
        assert (tmp_path / ".lease" / "1.released").exists()


def write(folder: Path, text: str) -> Path:
    lease = folder / ".lease" / "7"
    lease.parent.mkdir(mode=0o700)
    lease.write_text(text)
    lease.chmod(0o600)
    return lease


def lease_of(folder: Path, **changed: object) -> Path:
    """The lease number 7 of a process that lives, but for what is changed."""
    parent = look(os.getppid())
    assert parent is not None
    holder = replace(Holder.here("a trainer"), pid=parent.pid, started=parent.started, job="")
    return write(folder, json.dumps(asdict(replace(holder, **changed))))  # type: ignore[arg-type]


ELSEWHERE = {"host": "node9", "boot": "another", "pid": 2**22 + 1}


def over(job: str, cluster: str) -> bool:
    return (job, cluster) == ("12_3", "alpha")


@pytest.mark.parametrize(
    "changed",
    [
        {"started": 1},  # the number is another process's by now
        {"boot": "the one before"},
        {**ELSEWHERE, "job": "12_3", "cluster": "alpha"},
        {**ELSEWHERE, "job": "5", "cluster": "beta", "restarts": 0},  # before it was requeued
    ],
)
def test_a_holder_that_is_proven_to_be_gone_is_taken_over(
    changed: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "beta")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lease_of(tmp_path, **changed)

    with hold(tmp_path, "the next", job_ended=over) as fence:
        assert fence.number == 8


@pytest.mark.parametrize(
    "changed",
    [
        ELSEWHERE,
        {**ELSEWHERE, "job": "12_3", "cluster": "beta"},  # another cluster's job of that number
        {**ELSEWHERE, "job": "5", "cluster": "beta"},  # another node of this very job
        {"space": 1, "pid": 2**22 + 1},  # in a container, whose numbers mean nothing here
    ],
)
def test_a_holder_that_cannot_be_reached_is_refused_until_a_person_says_that_it_is_gone(
    changed: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "beta")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    os.utime(lease_of(tmp_path, **changed), (1, 1))  # silence of years proves nothing

    with (
        pytest.raises(RefusedError, match=r"a trainer \(pid .* not proven to be gone") as refused,
        hold(tmp_path, "the next", job_ended=over),
    ):
        pass
    command = refused.value.hint.partition(": ")[2]
    subprocess.run(shlex.split(command), check=True)
    with hold(tmp_path, "the next") as fence:
        assert fence.number == 8


def test_a_lease_that_says_nothing_is_refused_with_the_command_that_clears_it(
    tmp_path: Path,
) -> None:
    write(tmp_path, '{"pid": "\x1b[31m')

    with pytest.raises(RefusedError, match=r"is in use: .* is not JSON") as refused:
        hold(tmp_path, "the next").__enter__()

    subprocess.run(shlex.split(refused.value.hint), check=True)
    with hold(tmp_path, "the next") as fence:
        assert fence.number == 8


def test_where_a_file_has_one_name_only_the_folder_is_held_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_names: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)

    with hold(tmp_path, "the first") as first:
        with pytest.raises(RefusedError, match="in use: the first"), hold(tmp_path, "second"):
            pass
        first.check()
