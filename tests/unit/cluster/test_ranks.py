"""Ranks as components, and the mapping of Slurm's task to a rank."""

import subprocess
import sys
from pathlib import Path

import pytest

from shakedown.cluster.ranks import rank_components
from shakedown.cluster.task_start import main, rank_environment, tasks_on_node
from shakedown.core.errors import LaunchError, UsageError

TASK = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_one_node_gives_one_component_a_rank(tmp_path: Path) -> None:
    parts = rank_components(
        argv=["prog"], world_size=2, nodes=["n1"], log_dir=tmp_path, env={"A": "b"}, master_port=7
    )

    assert [part.name for part in parts] == ["trainer-rank0", "trainer-rank1"]
    assert parts[1].log == tmp_path / "trainer-rank1.log"
    assert parts[1].rank == 1
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "7",
        "OMP_NUM_THREADS": "1",
        "A": "b",
    }
    assert expected.items() <= parts[1].env.items()


def test_the_users_interface_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")

    (part,) = rank_components(
        argv=["x"], world_size=1, nodes=["n"], log_dir=tmp_path, env={}, master_port=1
    )

    assert "GLOO_SOCKET_IFNAME" not in part.env


def test_several_nodes_give_one_srun(tmp_path: Path) -> None:
    (part,) = rank_components(
        argv=["prog", "arg"],
        world_size=4,
        nodes=["n1", "n2"],
        log_dir=tmp_path,
        env={},
        master_port=7,
    )

    assert (part.env["MASTER_ADDR"], "GLOO_SOCKET_IFNAME" in part.env) == ("n1", False)
    assert part.name == "trainer-srun"
    assert part.rank is None
    command = list(part.argv)
    step = command[command.index("srun") :]
    assert {"--overlap", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"} <= set(step)
    assert {"--nodelist=n1,n2", "--kill-on-bad-exit=0", "--distribution=block"} <= set(step)
    assert f"--output={tmp_path}/trainer-rank%t.log" in step
    assert step[-4:] == ["shakedown.cluster.task_start", "--", "prog", "arg"]


def test_options_of_srun_send_one_node_through_it_too_in_a_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    image = "--container-image=/images/rl.sqsh"

    (part,) = rank_components(
        argv=["prog"],
        world_size=2,
        nodes=["n1"],
        log_dir=tmp_path,
        env={},
        master_port=1,
        srun_args=[image],
    )

    assert part.name == "trainer-srun"
    assert part.argv.index(image) < part.argv.index("prog")
    assert (part.env["MASTER_ADDR"], part.env["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")


@pytest.mark.parametrize(
    ("ranks", "nodes"), [(3, ["a", "b"]), (1, ["a", "b"]), (0, ["a"]), (1, [])]
)
def test_uneven_ranks_are_refused(tmp_path: Path, ranks: int, nodes: list[str]) -> None:
    with pytest.raises(UsageError, match="do not spread equally"):
        rank_components(
            argv=["x"], world_size=ranks, nodes=nodes, log_dir=tmp_path, env={}, master_port=1
        )


def test_slurms_task_becomes_a_rank() -> None:
    assert rank_environment(TASK) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
    }


def test_a_missing_slurm_variable_is_named() -> None:
    with pytest.raises(UsageError, match="SLURM_PROCID"):
        rank_environment({})


@pytest.mark.parametrize(
    ("text", "node", "count"), [("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4", 0, 4)]
)
def test_tasks_on_node_reads_slurms_short_form(text: str, node: int, count: int) -> None:
    assert tasks_on_node(text, node) == count


@pytest.mark.parametrize(("text", "node"), [("", 0), ("2(x3", 0), ("x", 0), ("2", 1), ("2", -1)])
def test_tasks_on_node_refuses_other_text(text: str, node: int) -> None:
    with pytest.raises(UsageError):
        tasks_on_node(text, node)


def test_bootstrap_becomes_the_command() -> None:
    program = "import os; print(os.environ['RANK'], os.environ['LOCAL_WORLD_SIZE'])"
    ended = subprocess.run(
        [sys.executable, "-m", "shakedown.cluster.task_start", "--", sys.executable, "-c", program],
        env=TASK,
        capture_output=True,
        text=True,
        check=True,
    )

    assert ended.stdout.split() == ["3", "2"]


def test_bootstrap_says_what_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(LaunchError, match="/nonexistent/program"):
        main(["--", "/nonexistent/program"])


def test_bootstrap_needs_a_command() -> None:
    with pytest.raises(UsageError, match="no command"):
        main(["--"])
