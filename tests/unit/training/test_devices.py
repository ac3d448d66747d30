"""Which nodes and GPUs a stage gives to its trainer and its server, and how ranks learn of it."""

from pathlib import Path

import pytest

from shakedown.cluster.gpus import GPUS, device_number, visible_gpus, wanted_gpus
from shakedown.cluster.placement import PlacementError
from shakedown.cluster.ranks import rank_components
from shakedown.cluster.task_start import main as bootstrap
from shakedown.config import ServeConfig, StageConfig
from shakedown.core.errors import UsageError
from shakedown.core.paths import AttemptPaths
from shakedown.slurm.hostlist import node_name
from shakedown.training.stage.components import server_plan, trainer_components
from shakedown.training.stage.devices import StageDevices, stage_devices
from shakedown.training.stage.job import StageJob


def _stage(allocation: str, nodes: int = 1, *, grpo: bool = True) -> StageConfig:
    return StageConfig.model_validate(
        {
            "algorithm": "grpo" if grpo else "sft",
            "allocation": allocation,
            "nodes": nodes,
            "steps": 1,
            "batch_size": 8,
            "optimizer": {"lr": 1e-6},
            "grpo": {} if grpo else None,
        }
    )


@pytest.mark.parametrize(
    ("stage", "serve", "nodes", "gpus"),
    [
        (_stage("fsdp:d6"), ("vllm:d2", False), "a", ("2,3,4,5,6,7", "0,1")),
        (_stage("fsdp:d8", 2), ("vllm:d4", False), "ab", ("4,5,6,7", "0,1,2,3")),
        (_stage("fsdp:d8", 2), ("vllm:d8", False), "b", ("0,1,2,3,4,5,6,7", "0,1,2,3,4,5,6,7")),
        (_stage("fsdp:d16", 2), ("vllm:t2", True), "ab", ("0,1,2,3,4,5,6,7", "0,1")),
    ],
)
def test_a_stage_gives_its_trainer_and_server_their_gpus(
    stage: StageConfig, serve: tuple[str, bool], nodes: str, gpus: tuple[str, str]
) -> None:
    config = ServeConfig(allocation=serve[0], share_gpus=serve[1])

    found = stage_devices(stage, config, ["a", "b"][: stage.nodes], 8, environ={})

    assert "".join(found.trainer_nodes) == nodes
    assert found.trainer == {GPUS: gpus[0]}
    assert found.server == {"CUDA_VISIBLE_DEVICES": gpus[1]}


def test_a_stage_whose_tensor_groups_fill_one_node_stays_on_it() -> None:
    found = stage_devices(_stage("megatron:t8", 2, grpo=False), ServeConfig(), ["a", "b"], 8, {})

    assert (list(found.trainer_nodes), found.trainer) == (["a"], {})


def test_a_server_of_transformers_is_one_process() -> None:
    serve = ServeConfig(engine="transformers")

    found = stage_devices(_stage("fsdp:d7"), serve, ["a"], 8, environ={})

    assert found.server == {"CUDA_VISIBLE_DEVICES": "0"}
    assert found.trainer == {GPUS: "1,2,3,4,5,6,7"}


def test_a_stage_without_gpus_or_without_a_server_assigns_none() -> None:
    for stage, gpus in ((_stage("fsdp:d2"), 0), (_stage("fsdp:d2", grpo=False), 8)):
        found = stage_devices(stage, ServeConfig(), ["a"], gpus, environ={})

        assert (list(found.trainer_nodes), found.trainer, found.server) == (["a"], {}, {})


def test_servers_on_several_nodes_have_the_same_gpus_on_each() -> None:
    serve = ServeConfig(allocation="vllm:d2", nodes=2)

    found = stage_devices(_stage("fsdp:d8", 2), serve, ["a", "b"], 8, environ={})

    assert list(found.server_nodes) == ["a", "b"]
    assert found.trainer == {GPUS: "2,3,4,5"}
    assert found.elsewhere == {GPUS: "0,1"}


def test_a_second_server_on_the_trainer_s_gpus_is_refused() -> None:
    serve = ServeConfig(allocation="vllm:d8", nodes=2)  # fills the first node

    with pytest.raises(UsageError, match="would both have GPU 0, 1, 2, 3, 4, 5, 6, 7 of b"):
        stage_devices(_stage("fsdp:d8", 2), serve, ["a", "b"], 8, environ={})


def test_each_further_node_s_server_is_started_there_and_listens_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    attempt = AttemptPaths(tmp_path / "001")
    attempt.root.mkdir()
    devices = StageDevices(["a"], server_nodes=["a", "b"], elsewhere=wanted_gpus([0]))

    plan = server_plan(ServeConfig(), "model", "float32", attempt, 0, devices=devices)

    here, there = plan.components
    first, second = plan.base_url.split(",")
    assert (here.name, there.name) == ("inference", "inference-1")
    assert first.startswith("http://127.0.0.1:")
    assert second.startswith("http://b:")
    assert here.argv[0] != "env"
    assert "--nodelist=b" in there.argv
    assert there.argv[there.argv.index("--host") + 1] == "b"
    assert there.env[GPUS] == "0"


def test_a_program_on_another_node_gets_a_temporary_folder_that_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1")
    seen: dict[str, str] = {}
    monkeypatch.setattr("os.execvpe", lambda _file, _argv, env: seen.update(env))

    bootstrap(["--node", "--temporary", "--", "x"])

    made = Path(seen["TMPDIR"])
    assert made.stat().st_mode & 0o077 == 0
    made.rmdir()


def test_a_server_larger_than_a_node_is_refused() -> None:
    with pytest.raises(PlacementError, match="needs 16 GPUs, and a server runs on one node of 8"):
        stage_devices(_stage("fsdp:d8", 4), ServeConfig(allocation="vllm:d16"), list("abcd"), 8, {})


@pytest.mark.parametrize(
    ("shown", "seen"),
    [
        (None, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ("4,5,6,7", {"CUDA_VISIBLE_DEVICES": "6,7"}),
        ("GPU-a, GPU-b, GPU-c, GPU-d", {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d"}),
        ("", {}),
        ("-1", {}),
        ("NoDevFiles", {}),
    ],
)
def test_gpus_are_taken_out_of_those_that_are_shown(
    shown: str | None, seen: dict[str, str]
) -> None:
    environ = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}

    assert visible_gpus(wanted_gpus([2, 3]), environ) == seen
    assert visible_gpus(wanted_gpus([]), environ) == {}


def test_fewer_gpus_than_wanted_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="GPUs 2,3 are wanted, but CUDA_VISIBLE_DEVICES=0,1 shows"):
        visible_gpus(wanted_gpus([2, 3]), {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_ranks_here_see_their_gpus_and_ranks_elsewhere_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    env = wanted_gpus([1, 2])

    def started(*, elsewhere: bool) -> list[str]:
        parts = rank_components(
            argv=["x"],
            world_size=2,
            nodes=["n"],
            log_dir=tmp_path,
            env=env,
            master_port=1,
            elsewhere=elsewhere,
        )
        assert all(part.env[GPUS] == "1,2" for part in parts)
        return [part.env.get("CUDA_VISIBLE_DEVICES", part.name) for part in parts]

    assert started(elsewhere=False) == ["5,6", "5,6"]
    assert started(elsewhere=True) == ["trainer-srun"]


@pytest.mark.parametrize(("node", "remote"), [(node_name(), False), ("some-other-node", True)])
def test_a_trainer_on_another_node_is_started_there_by_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, remote: bool
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    job = StageJob(
        stage="grpo",
        config=_stage("fsdp:d1", 2),
        model="",
        dtype="float32",
        train="",
        heldout="",
        reward="",
        seed=0,
        world_size=1,
        stage_root="",
        attempt_root=str(tmp_path),
    )

    (part,) = trainer_components(job, tmp_path / "job.json", [node], (), wanted_gpus([0]))

    assert part.env[GPUS] == "0"
    assert part.env["MASTER_ADDR"] == "127.0.0.1"  # its ranks are all there
    assert (f"--nodelist={node}" in part.argv) == remote


def test_a_rank_under_srun_takes_its_gpus_from_those_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = {"PROCID": "3", "LOCALID": "1", "NTASKS": "4", "NODEID": "1"}
    for name, value in task.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv(GPUS, "2,3")
    seen: dict[str, str] = {}
    monkeypatch.setattr("os.execvpe", lambda _file, _argv, env: seen.update(env))

    bootstrap(["--", "x"])

    assert (seen["LOCAL_RANK"], seen["CUDA_VISIBLE_DEVICES"]) == ("1", "2,3")


@pytest.mark.parametrize(
    ("local", "slurm", "visible", "number"),
    [("3", "3", 8, 3), ("3", None, 8, 3), ("3", "3", 1, 0), ("0", None, 1, 0), ("1", "1", 2, 1)],
)
def test_a_rank_takes_its_own_gpu_also_where_slurm_shows_it_that_one_alone(
    local: str, slurm: str | None, visible: int, number: int
) -> None:
    environ = {"LOCAL_RANK": local} | ({"SLURM_LOCALID": slurm} if slurm else {})

    assert device_number(environ, visible) == number


@pytest.mark.parametrize(("slurm", "visible"), [(None, 1), ("0", 1), ("3", 2)])
def test_a_rank_without_a_gpu_says_so(slurm: str | None, visible: int) -> None:
    """A batch step has SLURM_LOCALID 0, and its ranks share what it shows."""
    environ = {"LOCAL_RANK": "3"} | ({"SLURM_LOCALID": slurm} if slurm else {})

    with pytest.raises(UsageError, match=f"rank 3 of this node has no GPU: {visible} are visible"):
        device_number(environ, visible)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_ranks_have_growing_segments_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def told() -> str | None:
        job = StageJob(
            stage="sft",
            config=_stage("fsdp:d1", grpo=False),
            model="m",
            dtype="float32",
            train="t",
            heldout="h",
            reward="exact_match",
            seed=0,
            world_size=1,
            stage_root=str(tmp_path),
            attempt_root=str(tmp_path / "001"),
        )
        (rank,) = trainer_components(job, tmp_path / "job.json", [node_name()])
        return rank.env.get("PYTORCH_ALLOC_CONF")

    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    assert told() == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert told() is None
