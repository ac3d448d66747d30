"""Ranks in containers, seen from the host, and a collector that is in one itself."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths
from shakedown.monitor.collect import collect_local, from_pattern, from_pids, hooked, inside
from shakedown.monitor.collect.pyspy import find_pyspy
from tests.containers import Container, python_path, table, unshares
from tests.unit.monitor.test_collect import PARENT
from tests.unit.monitor.test_collect_faults import RECORDER

pytestmark = pytest.mark.skipif(not unshares(), reason="this user may not make namespaces here")

SLEEPER = """
import sys, time
print("of", sys.argv[1], file=sys.stderr, flush=True)
def waits_here():
    print("ready", flush=True)
    time.sleep(600)
waits_here()
"""
# Logs of its own; one is a link that leads elsewhere when it is followed from outside.
LOGS = "mkdir /mnt/logs && echo inside > /mnt/logs/train.log && ln -s /etc/passwd /mnt/logs/x.log"


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Container]]:
    """Two ranks, each the first process of its own container."""
    mark = f"contained-{os.getpid()}"
    made = [
        Container(
            f"box{rank}", SLEEPER, f"{mark}-{rank}",
            before=f"{LOGS} && exec 2> /mnt/stderr", RANK=str(rank), WORLD_SIZE="2",
        )
        for rank in (0, 1)
    ]  # fmt: skip
    yield made
    for rank in made:
        rank.end()


def test_rank_in_a_container_is_found_by_its_environment_and_known_by_both_ids(
    ranks: list[Container], tmp_path: Path
) -> None:
    targets = from_pattern(f"contained-{os.getpid()}")
    collect_local(targets, tmp_path, rounds=1)
    rows = table(tmp_path)["targets"]
    assert [(row["rank"], row["pid"], row["inner_pid"]) for row in rows] == [
        (rank, container.pid, 1) for rank, container in enumerate(ranks)
    ]
    assert all(row["missed"] == [] and row["sources"] for row in rows)


def test_process_outside_of_containers_has_one_id_alone() -> None:
    assert inside.inner_pid(os.getpid()) is None
    assert inside.inner_pid(2**22) is None


def test_files_of_one_name_in_two_containers_are_two_files(
    ranks: list[Container], tmp_path: Path
) -> None:
    collect_local(from_pids([r.pid for r in ranks]), tmp_path, rounds=1)
    found = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    mark = f"of contained-{os.getpid()}"
    assert found == {f"trainer-rank{r}.err": f"{mark}-{r}\n" for r in (0, 1)}


def test_logs_are_read_where_the_containers_have_them(
    ranks: list[Container], tmp_path: Path
) -> None:
    one, both, none = (tmp_path / name for name in ("one", "both", "none"))
    collect_local(from_pids([ranks[0].pid]), one, logs=Path("/mnt/logs"), rounds=1)
    collect_local(from_pids([r.pid for r in ranks]), both, logs=Path("/mnt/logs"), rounds=1)
    collect_local(from_pids([ranks[0].pid]), none, logs=Path("/mnt/nowhere"), rounds=1)
    assert (one / "logs/train.log").read_text() == "inside\n"
    copied = sorted(str(path.relative_to(both)) for path in both.rglob("*.log"))
    assert copied == ["logs/container0/train.log", "logs/container1/train.log"]
    assert table(one)["missed"] == ["log x.log: Too many levels of symbolic links"]
    assert table(none)["missed"] == ["logs /mnt/nowhere: No such file or directory"]


def test_folder_behind_a_link_in_a_container_is_not_entered(tmp_path: Path) -> None:
    container = Container("box", SLEEPER, "linked", before="ln -s /etc /mnt/logs")
    try:
        with inside.folders([container.pid], Path("/mnt/logs")) as found:
            assert found == []
        with inside.folders([container.pid, container.pid], Path("/mnt")) as found:
            assert len(found) == 1
    finally:
        container.end()


def test_hook_in_a_container_writes_and_is_asked_there(tmp_path: Path) -> None:
    container = Container("box", RECORDER, "/mnt/evidence", RANK="7")
    try:
        found = hooked.find(container.pid)
        assert found is not None
        assert found.evidence == container.file("/mnt/evidence")
        report = collect_local(from_pids([container.pid]), tmp_path, rounds=1)
        assert container.file("/mnt/evidence/REQUEST").is_file()
    finally:
        container.end()
    assert report.targets[0].missed == []
    assert report.targets[0].sources[0] == "round1/faulthandler-trainer-rank7.txt"
    assert (tmp_path / "fr-trainer-rank7.pickle").read_bytes() == b"recorded"


def test_stack_that_was_read_inside_is_the_ranks_own(
    ranks: list[Container], tmp_path: Path
) -> None:
    collect_local(from_pids([ranks[1].pid]), tmp_path, rounds=1)
    dumped = ranks[1].run(str(find_pyspy()), "dump", "--pid", "1")
    (tmp_path / "by-hand.txt").write_text(dumped.stdout)
    facts = build_facts(read_paths([tmp_path]).records)
    assert dumped.stdout.startswith("Process 1: ")
    assert list(facts.ranks) == [1]
    assert {stack.who.pid for stack in facts.ranks[1].stacks} == {ranks[1].pid}
    assert len(facts.ranks[1].stacks) == 2
    assert facts.unplaced == []


def test_worker_that_was_read_inside_is_its_ranks(tmp_path: Path) -> None:
    container = Container("box", PARENT, "with-a-worker", RANK="2")
    try:
        collect_local(from_pids([container.pid]), tmp_path / "ours", rounds=1)
        dumped = container.run(str(find_pyspy()), "dump", "--subprocesses", "--pid", "1").stdout
    finally:
        container.end()
    (tmp_path / "by-hand.txt").write_text(dumped)
    paths = [tmp_path / "by-hand.txt", *(tmp_path / "ours").glob("collected-*.json")]
    facts = build_facts(read_paths(paths).records)
    assert [stack.parent_pid for stack in facts.ranks[2].children] == [1]
    assert facts.unplaced == []


def test_first_processes_of_two_containers_are_not_taken_for_one(
    ranks: list[Container], tmp_path: Path
) -> None:
    collect_local(from_pids([r.pid for r in ranks]), tmp_path, rounds=1)
    for number, rank in enumerate(ranks):
        dumped = rank.run(str(find_pyspy()), "dump", "--pid", "1").stdout
        (tmp_path / f"by-hand-rank{number}.txt").write_text(dumped)
    said = diagnose_paths([tmp_path])
    assert "as one process" not in said.summary
    assert "given as the processes" not in said.summary
    facts = build_facts(read_paths([tmp_path]).records)
    assert [len(c.stacks) for c in facts.ranks.values()] == [2, 2]

    (tmp_path / "whose.txt").write_text(dumped)
    assert len(build_facts(read_paths([tmp_path]).records).unplaced) == 1


@pytest.mark.parametrize("without", ["", "sys_ptrace"])
def test_collector_in_a_container_says_what_it_cannot_see_and_read(
    without: str, ranks: list[Container], tmp_path: Path
) -> None:
    collect = [sys.executable, "-m", "shakedown.cli", "hang", "collect", "--rounds", "1"]
    chosen = ["--match", "contained-", "--out", str(tmp_path)]
    done = ranks[0].run(*python_path(), *collect, *chosen, without=without)
    assert done.returncode == 0, done.stderr
    body = table(tmp_path)
    (row,) = body["targets"]
    assert body["missed"] == ["this is a container: processes outside it cannot be seen"]
    assert (row["pid"], row["inner_pid"]) == (1, None)
    if without:
        assert "no permission: this container lacks SYS_PTRACE" in row["missed"][0]
    else:
        assert row["missed"] == []
