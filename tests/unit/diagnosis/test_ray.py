"""Ray's actors in a diagnosis, from files as the collector and the driver write them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.outcome import Outcome
from shakedown.core.verdict import Verdict
from shakedown.diagnosis.diagnose import diagnose_paths

NODE = "a8f01b1f2de7d09a8df3a27080a849b4"
DIED = (
    'actor_died_error_context {\n  error_message: "The actor is dead because its worker process '
    "has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    'connection error code 2. End of file. Some common causes include: (1) the OOM killer"'
)


def target(name: str, pid: int, role: str, rank: int | None, state: str = "S") -> dict[str, Any]:
    states = [{"state": state, "wchan": "", "threads": []}] * 2
    return {
        "name": name, "pid": pid, "role": role, "rank": rank, "states": states, "missed": [],
        "sources": [], "inner_pid": None, "world": 0 if rank is None else 4,
    }  # fmt: skip


def policy(*states: str) -> list[dict[str, Any]]:
    return [
        target(f"PolicyWorker-rank{r}", 100 + r, "actor PolicyWorker", r, state)
        for r, state in enumerate(states)
    ]


def write(folder: Path, rows: Sequence[Mapping[str, Any]], **cluster: Any) -> None:
    """The collector's table, and what the cluster told it."""
    table = {"schema": "shakedown/collected/1", "host": "n1", "targets": rows}
    folder.joinpath("collected-n1.json").write_text(json.dumps(table))
    told = {"address": "n1:6379", "session": "session_1", "missed": "", "logs": [], **cluster}
    body = {"schema": "shakedown/ray/1", "host": "n1", "clusters": [told]}
    folder.joinpath("n1-ray.json").write_text(json.dumps(body))


def actor(name: str, pid: int, state: str, why: str = "", job: str = "01000000") -> dict[str, Any]:
    return {
        "ActorClassName": name, "Name": "", "JobID": job, "State": state, "Pid": pid,
        "DeathCause": why, "Address": {"NodeID": NODE, "IPAddress": "192.0.2.2"},
    }  # fmt: skip


def named(verdict: Verdict) -> Any:
    return verdict.extra["diagnosis"]["culprits"]


def test_a_stopped_actor_is_its_rank_and_the_sentence_says_which_actor(tmp_path: Path) -> None:
    write(tmp_path, [*policy("S", "S", "S", "T"), target("pid7", 7, "driver", None)])

    verdict = diagnose_paths([tmp_path])

    assert named(verdict) == {"ranks": [3], "nodes": [], "roles": []}
    assert "rank 3 is actor PolicyWorker, process 103" in verdict.summary


def test_where_two_classes_count_from_0_each_actor_is_a_role(tmp_path: Path) -> None:
    critics = [target(f"Critic-rank{r}", 200 + r, "actor Critic", r, "ST"[r]) for r in (0, 1)]
    write(tmp_path, [*policy("S", "S"), *critics])

    assert named(diagnose_paths([tmp_path]))["roles"] == ["actor Critic rank 1"]


def test_an_actor_without_a_rank_is_named_by_its_process(tmp_path: Path) -> None:
    write(tmp_path, [*policy("S", "S"), target("Reward-pid9", 9, "actor Reward", None, "T")])

    assert named(diagnose_paths([tmp_path]))["roles"] == ["actor Reward process 9"]


def test_a_dead_actor_is_the_rank_that_no_living_one_has(tmp_path: Path) -> None:
    rows = [actor("PolicyWorker", 100 + r, "ALIVE") for r in (0, 1, 2)]
    dead = actor("PolicyWorker", 103, "DEAD", DIED)
    old = actor("PolicyWorker", 55, "DEAD", DIED, job="00000000")
    write(tmp_path, policy("S", "S", "S"), actors=[*rows, dead, old])

    verdict = diagnose_paths([tmp_path])

    assert named(verdict) == {"ranks": [3], "nodes": [], "roles": []}
    assert "exits with a connection error code 2. End of file." in verdict.summary
    assert "common causes" not in verdict.summary


@pytest.mark.parametrize(
    "why", ["type: INTENDED_USER_EXIT", "killed by ray.kill", "the owner has died"]
)
def test_an_actor_that_was_told_to_end_is_not_named(tmp_path: Path, why: str) -> None:
    write(tmp_path, policy("S", "S"), actors=[actor("Reward", 9, "DEAD", why)])

    assert named(diagnose_paths([tmp_path])) == {"ranks": [], "nodes": [], "roles": []}


def test_a_placement_group_that_waits_names_what_it_waits_for(tmp_path: Path) -> None:
    group = {
        "name": "policy", "state": "PENDING", "bundles": {"0": {"GPU": 4.0}, "1": {"GPU": 4.0}},
        "stats": {"scheduling_state": "INFEASIBLE"},
    }  # fmt: skip
    write(tmp_path, [target("pid7", 7, "driver", None)], placement_groups=[group])

    verdict = diagnose_paths([tmp_path])

    assert "placement group policy waits for 4.0 GPU, 4.0 GPU (INFEASIBLE)" in verdict.summary


def test_a_head_that_neither_answers_nor_is_reached_by_its_node(tmp_path: Path) -> None:
    line = "[2026-11-26 03:26:19,246 W 1 1] (raylet) rpc_client.h:153: Failed to connect to GCS"
    write(tmp_path, policy("S", "S"), missed="the head does not answer", logs=[line])

    assert named(diagnose_paths([tmp_path]))["roles"] == ["ray head"]


def test_a_full_object_store_is_told(tmp_path: Path) -> None:
    Outcome("lab", 1, "hung", "command has stood still for 15 s").write(tmp_path / "outcome.json")
    write(tmp_path, policy("S", "S"), logs=["Object store is full: 9 objects in use"])

    assert diagnose_paths([tmp_path]).extra["diagnosis"]["cause"] == "out_of_memory"
