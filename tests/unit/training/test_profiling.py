"""How a stage's workers are told of a profile."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shakedown.config import ProfileConfig, ServeConfig, load_config
from shakedown.core.paths import AttemptPaths
from shakedown.monitor.heartbeat import Heartbeat
from shakedown.profiling.capture import VARIABLE, read_order
from shakedown.slurm.hostlist import node_name
from shakedown.training.stage.components import server_plan, trainer_components
from shakedown.training.stage.devices import StageDevices
from shakedown.training.stage.job import StageJob

PROFILE = ProfileConfig(workers="*policy*,inference", steps="3:5")
LAUNCHED = (sys.executable, "-P", "-m", "shakedown.profiling.launch", "--")


@pytest.fixture
def job(tmp_path: Path) -> StageJob:
    config = load_config(Path(__file__).parents[3] / "config" / "config.yaml").own_stages["grpo"]
    return StageJob(
        stage="grpo",
        config=config,
        model="model",
        dtype="float32",
        train="train.jsonl",
        heldout="heldout.jsonl",
        reward="exact_match",
        seed=0,
        world_size=2,
        stage_root=str(tmp_path),
        attempt_root=str(tmp_path / "001"),
    )


@pytest.mark.parametrize(
    ("allocation", "worker"),
    [
        ("fsdp:d2", "dtensor_policy_worker"),
        ("archon:d2", "dtensor_policy_worker"),
        ("megatron:d2", "megatron_policy_worker"),
    ],
)
def test_ranks_have_the_names_of_nemo_rl(job: StageJob, allocation: str, worker: str) -> None:
    stage = job.config.model_copy(update={"allocation": allocation})

    ranks = trainer_components(
        replace(job, config=stage), job.attempt.job, [node_name()], profile=PROFILE
    )

    for number, rank in enumerate(ranks):
        order = read_order(rank.env)
        assert order is not None
        assert rank.argv[: len(LAUNCHED)] == LAUNCHED
        assert order.names(rank.env) == [worker, "trainer", f"trainer-rank{number}"]
        assert (order.start, order.stop, order.steps_by) == (3, 5, "")


def test_the_server_follows_the_heartbeat_of_rank_0(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "001")
    attempt.root.mkdir()

    devices = StageDevices(["here"], server_nodes=["here"])
    plan = server_plan(
        ServeConfig(), "model", "float32", attempt, 0, devices=devices, profile=PROFILE
    )

    (server,) = plan.components
    order = read_order(server.env)
    assert order is not None
    assert server.argv[: len(LAUNCHED)] == LAUNCHED
    assert order.names({}) == ["vllm_generation_worker", "inference"]
    assert order.steps_by == str(Heartbeat(attempt.heartbeats, 0).path)
    assert order.target == str(attempt.profiles)


def test_without_a_profile_nothing_stands_before_a_worker(job: StageJob) -> None:
    ranks = trainer_components(job, job.attempt.job, [node_name()])

    assert not [rank for rank in ranks if VARIABLE in rank.env or "-P" in rank.argv]
