"""Workers of Ray by their titles, logs and environments: real processes that look like them."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shakedown.monitor.collect import from_processes
from shakedown.monitor.collect.environ import environ_now
from shakedown.monitor.collect.ray import query, worker_of

SETS_ITS_RANK = (
    "import os, sys; os.environ['RANK'] = sys.argv[1]; os.environ['WORLD_SIZE'] = '4'\n"
    "print('ready', flush=True); sys.stdin.read()"
)
Begin = Callable[..., int]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start a Python under a title, its standard error a file that begins with `told`."""
    processes: list[subprocess.Popen[bytes]] = []

    def run(title: str, told: str = "", rank: str = "3") -> int:
        log = tmp_path / f"worker-{len(processes)}.err"
        log.write_text(told)
        with log.open("ab") as stream:
            processes.append(
                subprocess.Popen(
                    [title, "-c", SETS_ITS_RANK, rank],
                    executable=sys.executable,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
                )
            )
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline() == b"ready\n"
        return processes[-1].pid

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_a_variable_that_a_process_set_after_its_start_is_read(begin: Begin) -> None:
    pid = begin("python")

    assert b"RANK=" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert environ_now(pid, (b"RANK=", b"WORLD_SIZE=")) == {"RANK": "3", "WORLD_SIZE": "4"}


def test_a_process_that_is_gone_has_no_environment() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()

    assert environ_now(ended.pid, (b"PATH=",)) == {}


@pytest.mark.parametrize(
    ("title", "told", "expected"),
    [
        ("ray::PolicyWorker.step", "", ("actor PolicyWorker", "PolicyWorker", None)),
        ("ray::PolicyWorker.step()", "", ("actor PolicyWorker", "PolicyWorker", None)),
        ("ray::main_task", "", ("task main_task", "main_task", None)),
        # An actor that waits for a call bears no method, one that was just made not even a name.
        ("ray::Critic", ":job_id:01\n:actor_name:Critic\n", ("actor Critic", "Critic", None)),
        ("ray::IDLE", ":actor_name:Critic\n", ("actor Critic", "Critic", None)),
        ("ray::Lm.run", ":actor_name:Lm[rank=5]\n", ("actor Lm", "Lm", 5)),
        ("ray::IDLE", ":job_id:01\n", None),
        ("ray::DashboardAgent", "", None),
        ("python", ":actor_name:Critic\n", None),
    ],
)
def test_a_worker_is_told_by_its_title_and_by_the_begin_of_its_log(
    begin: Begin, title: str, told: str, expected: tuple[str, str, int | None] | None
) -> None:
    assert worker_of(begin(title, told)) == expected


def test_actors_have_their_ranks_the_driver_its_role_and_ray_itself_is_left_out(
    begin: Begin,
) -> None:
    workers = [begin("ray::PolicyWorker.step", rank=str(rank)) for rank in (0, 1)]
    driver, agent = begin("python", rank=""), begin("ray::RuntimeEnvAgent")

    found = {t.pid: t for t in from_processes({*workers, driver, agent})}

    assert {(t.name, t.role, t.rank, t.world) for p, t in found.items() if p in workers} == {
        ("PolicyWorker-rank0", "actor PolicyWorker", 0, 4),
        ("PolicyWorker-rank1", "actor PolicyWorker", 1, 4),
    }
    assert found[driver].role == "driver"
    assert agent not in found
    # `RolloutServer` would be read as the name of a server.
    assert found[workers[0]].file_name == f"pid{workers[0]}"


def test_two_classes_with_the_same_rank_keep_theirs(begin: Begin) -> None:
    pids = {begin("ray::Policy.step", rank="0"), begin("ray::Critic.step", rank="0")}

    assert {t.name for t in from_processes(pids)} == {"Policy-rank0", "Critic-rank0"}


def test_without_a_raylet_ray_is_not_there() -> None:
    with pytest.raises(LookupError, match="no raylet"):
        query([os.getpid()], "127.0.0.1:1")
