"""Samplers: what they see and may not do, and how they are reached, lost and started again."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shakedown.cluster.nodes import free_port
from shakedown.core.errors import LaunchError
from shakedown.monitor.attach.sampler import lacking
from shakedown.monitor.attach.samplers import Samplers, Start
from shakedown.monitor.attach.subjects import Processes, SlurmJob
from shakedown.slurm.hostlist import node_name
from tests.security.other_user import as_nobody
from tests.ssh_hosts import SSHD, private_hosts

RANK = 'import time; print("ready", flush=True); time.sleep(600)'


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[int]:
    """A process with an MPI launcher's number, and the folder's name in its command line."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)],
        env={**os.environ, "OMPI_COMM_WORLD_RANK": "3"},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process.pid
    process.kill()
    process.communicate()


def test_a_sampler_sees_a_rank_of_mpi_and_what_a_look_costs(rank: int, tmp_path: Path) -> None:
    samplers = Samplers(Processes(str(tmp_path)).starts(60))
    try:
        look = samplers.ask(60)[node_name()]
        again = samplers.ask(60)[node_name()]
    finally:
        samplers.close()
    assert look is not None
    assert again is not None
    (process,) = look.processes
    assert (process.name, process.pid, process.rank, process.state) == (
        "trainer-rank3",
        rank,
        3,
        "S",
    )
    assert (process.activity.timed, process.activity.output) == (1, 0)
    assert again.number == 2
    assert 0 < again.cost < 5


def test_what_a_launcher_reads_and_writes_is_no_sign_of_its_ranks(
    rank: int, tmp_path: Path
) -> None:
    torchrun = tmp_path / "torchrun"  # its store is asked every few seconds
    torchrun.write_text(RANK)
    command = [sys.executable, str(torchrun)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        samplers = Samplers(Processes(str(tmp_path)).starts(60))
        try:
            look = samplers.ask(60)[node_name()]
        finally:
            samplers.close()
            launcher.kill()
    assert look is not None
    seen = {process.pid: process for process in look.processes}
    assert (seen[launcher.pid].activity.cpu, seen[launcher.pid].activity.io) == (0, 0)
    assert seen[rank].activity.io > 0


@pytest.mark.slow
def test_a_sampler_that_is_lost_is_started_again(rank: int, tmp_path: Path) -> None:
    samplers = Samplers(Processes(str(tmp_path)).starts(60))
    try:
        samplers.ask(60)
        (running,) = samplers._running
        running.process.kill()
        running.process.wait()
        assert samplers.ask(5) == {node_name(): None}
        assert samplers.lost == [([node_name()], "")]
        samplers.revive(running.again_at)
        assert not samplers.lost
        assert samplers.ask(60)[node_name()] is not None
    finally:
        samplers.close()


def test_a_sampler_that_nobody_asks_ends_by_itself(tmp_path: Path) -> None:
    samplers = Samplers(Processes(str(tmp_path)).starts(1))
    try:
        assert samplers._running[0].process.wait(60) == 0
    finally:
        samplers.close()


def test_several_hosts_that_fail_twice_are_tried_one_by_one() -> None:
    def alone(host: str) -> Start:
        return Start(["echo", host], [host])

    samplers = Samplers([Start(["false"], ["n1", "n2"], alone=alone)])
    try:
        for later in (1e9, 2e9):
            assert [r.start.hosts for r in samplers._running] == [["n1", "n2"]]
            samplers._running[0].process.wait()
            samplers.revive(later)
        assert [r.start.hosts for r in samplers._running] == [["n1"], ["n2"]]
    finally:
        samplers.close()


def test_words_that_are_no_look_are_left_out_and_the_last_error_is_told() -> None:
    code = (
        "import sys; n = input(); print('welcome'); print('{\"schema\": \"shakedown/look/2\"}')"
        "; print('[' * 100000); sys.exit('srun: error: no such job')"
    )
    samplers = Samplers([Start([sys.executable, "-c", code], ["n1"])])
    try:
        assert samplers.ask(60) == {"n1": None}
        samplers._running[0].process.wait()
        assert samplers.lost == [(["n1"], "srun: error: no such job")]
    finally:
        samplers.close()


def test_a_program_that_is_not_there_is_said() -> None:
    with pytest.raises(LaunchError, match="cannot run /none"):
        Samplers([Start(["/none"], ["n1"])])


@pytest.mark.slow
@pytest.mark.skipif(SSHD is None, reason="needs sshd (openssh-server)")
def test_hosts_are_looked_at_by_ssh_under_the_names_that_were_given(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").mkdir()
    with private_hosts(tmp_path / "ssh") as known:
        known.start("alias1")
        known.add("gone", port=free_port())
        monkeypatch.setenv("PATH", f"{known.bin}:{os.environ['PATH']}")
        samplers = Samplers(Processes(str(tmp_path), ["alias1", "gone"]).starts(60))
        try:
            deadline = time.monotonic() + 60
            looks = samplers.ask(10)
            while looks["alias1"] is None and time.monotonic() < deadline:
                looks = samplers.ask(10)
            lost = samplers.lost
        finally:
            samplers.close()
    assert looks["gone"] is None
    assert looks["alias1"] is not None
    assert [process.pid for process in looks["alias1"].processes] == [rank]
    assert [hosts for hosts, _ in lost] == [["gone"]]
    assert "Connection refused" in lost[0][1]


def test_another_users_processes_and_jobs_are_said_to_be_theirs(rank: int, tmp_path: Path) -> None:
    assert Processes(str(tmp_path)).missing() == ""
    said = as_nobody(
        lambda: [Processes(str(tmp_path)).missing(), SlurmJob("7", owner="x").missing()]
    )
    assert said[0] == "processes of root match: run the watch as that user"
    assert said[1].startswith("it is a job of x, and this is ")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, []),
        ({"pyspy": False}, ["pip install py-spy"]),
        ({"scope": "1"}, []),
        ({"scope": "1", "traces": False}, ["sysctl kernel.yama.ptrace_scope=0"]),
        ({"scope": "3"}, ["until the next boot"]),
        ({"contained": True, "traces": False}, ["--cap-add=SYS_PTRACE"]),
        ({"hidden": ["trainer-rank1"]}, ["trainer-rank1: memory may not be read"]),
    ],
)
def test_what_is_lacking_is_said_with_what_would_give_it(
    changed: dict[str, object], says: list[str]
) -> None:
    usual: dict[str, object] = {"pyspy": True, "traces": True, "contained": False, "scope": ""}
    found = lacking(**{**usual, "hidden": (), **changed})  # type: ignore[arg-type]
    assert len(found) == len(says)
    assert all(words in line for words, line in zip(says, found, strict=True))
