"""What was changed while nobody watched: the outputs are always those of a run without a kill."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import private_slurm
import pytest
from private_slurm import control

from tests.slurm_fixtures import PATIENCE, UNTIL_GO, Workflow, environment, rule, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

Make = Callable[[str], Workflow]

# Every job notes its start, waits for the file `go`, and writes what it was told to.
_SHELL = f"echo start >> runs/{{rule}}; {UNTIL_GO}; echo"
_PYTHON = """
import os, time
with open("runs/" + name, "a") as stream:
    print("start", file=stream)
while not os.path.exists("go"):
    time.sleep(0.1)
"""
_SCRIPT = f"name = snakemake.rule\n{_PYTHON}\nprint(VALUE, file=open(snakemake.output[0], 'w'))\n"
SNAKEFILE = f"""
rule all:
    input: "params", "shell", "run", "script", "input", "config", "nothing", "last"
rule params:
    output: "params"
    params: value="old"
    shell: "{_SHELL} {{params.value}} > {{output}}"
rule shell:
    output: "shell"
    shell: "{_SHELL} old-shell > {{output}}"
rule run:
    output: "run"
    run:
        name = rule
        exec({_PYTHON!r})
        print("old-run", file=open(output[0], "w"))
rule script:
    output: "script"
    script: "make.py"
rule input:
    input: "in.txt"
    output: "input"
    shell: "value=$(cat {{input}}); {_SHELL} $value > {{output}}"
rule config:
    output: "config"
    script: "show.py"
rule nothing:
    output: "nothing"
    shell: "{_SHELL} same > {{output}}"
rule last:
    input: "nothing"
    output: "last"
    shell: "cp {{input}} {{output}}"
"""
RULES = ("params", "shell", "run", "script", "input", "config", "nothing")
NEW = {
    **dict.fromkeys(RULES, "new"),
    "shell": "new-shell",
    "run": "new-run",
    "nothing": "same",
    "last": "same",
}


def write(flow: Workflow, age: str) -> None:
    """Everything that a job may depend on, in its `old` or `new` form."""
    texts = {
        "Snakefile": SNAKEFILE.replace("old", age),
        "make.py": _SCRIPT.replace("VALUE", repr(age)),
        "show.py": _SCRIPT.replace("VALUE", "snakemake.config['value']"),
        "in.txt": age,
    }
    for name, text in texts.items():
        path = flow.folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def started(flow: Workflow) -> dict[str, int]:
    return {name: found.split().count("start") for name, found in flow.runs().items() if found}


def begun(make: Make) -> Workflow:
    """A workflow of which all jobs wait for the file `go`."""
    flow = make("")
    write(flow, "old")
    flow.start("--rerun-incomplete", "--config", "value=old")
    wait_for(lambda: set(started(flow)) == set(RULES), "all jobs")
    return flow


def finished(flow: Workflow, age: str) -> dict[str, str]:
    """What the outputs hold after the same command, with the config of `age`, came to its end."""
    write(flow, age)
    assert flow.run("--unlock").returncode == 0
    again = flow.start("--rerun-incomplete", "--config", f"value={age}")
    if not (flow.folder / "go").exists():
        runs = 2 * len(RULES)
        wait_for(lambda: flow.says("still runs") or sum(started(flow).values()) == runs, "the jobs")
        flow.touch("go")
    assert again.wait(PATIENCE) == 0, flow.read("snakemake.out")
    return {name: flow.read(name).strip() for name in (*RULES, "last")}


def lose_nodes(flow: Workflow, cluster: private_slurm.Cluster) -> None:
    """The nodes of all jobs die, and Slurm requeues them for the others."""
    rows = flow.slurm("squeue", "--noheader", "--array", "--format", "%N").split()
    for node in set(rows):
        control.lose(cluster.plan.folder, f"slurmd-{node}")
    wait_for(lambda: "RUNNING" not in " ".join(flow.live_jobs()), "jobs that wait again", 60)


def test_after_a_kill_the_outputs_are_those_of_what_is_there_now(workflow: Make) -> None:
    flow = begun(workflow)
    flow.kill()

    made = finished(flow, "new")

    assert made == NEW
    assert started(flow) == {**dict.fromkeys(RULES, 2), "nothing": 1}


def test_after_a_kill_nothing_runs_twice_where_nothing_changed(workflow: Make) -> None:
    flow = begun(workflow)
    flow.kill()

    made = finished(flow, "old")

    assert made == {name: value.replace("new", "old") for name, value in NEW.items()}
    assert started(flow) == dict.fromkeys(RULES, 1)


@pytest.mark.exhaustive
def test_after_jobs_ended_unwatched_the_outputs_are_those_of_what_is_there_now(
    workflow: Make,
) -> None:
    flow = begun(workflow)
    flow.kill()
    flow.touch("go")
    wait_for(lambda: not flow.live_jobs(), "the end of all jobs")

    made = finished(flow, "new")

    assert made == NEW
    assert started(flow) == {**dict.fromkeys(RULES, 2), "nothing": 1}


def test_behind_a_precommand_a_change_is_noticed_as_well(workflow: Make) -> None:
    flow = workflow(rule("a", UNTIL_GO))
    with_more = ("--precommand", "touch before", "--rerun-incomplete")
    flow.start(*with_more)
    wait_for(lambda: flow.has_run("a"), "the job")
    flow.kill()
    flow.touch("go")
    wait_for(lambda: not flow.live_jobs(), "the end of the job")
    snakefile = flow.read("Snakefile").replace("echo end", "echo new; echo end")
    (flow.folder / "Snakefile").write_text(snakefile, encoding="utf-8")
    assert flow.run("--unlock").returncode == 0

    done = flow.run(*with_more)

    assert done.returncode == 0
    assert (flow.folder / "before").exists()
    assert flow.runs() == {"a": "start end start end"}


@pytest.mark.exhaustive
def test_after_ctrl_c_the_outputs_are_those_of_what_is_there_now(workflow: Make) -> None:
    flow = begun(workflow)
    flow.started[-1].send_signal(signal.SIGINT)
    assert flow.started[-1].wait(PATIENCE) != 0
    wait_for(lambda: not flow.live_jobs(), "the end of all jobs")

    made = finished(flow, "new")

    assert made == NEW
    assert started(flow) == dict.fromkeys(RULES, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "age",
    ["old", "new"],
)
def test_after_a_kill_and_lost_nodes_the_outputs_are_those_of_what_is_there_now(
    workflow: Make, slurm_cluster: private_slurm.Cluster, age: str
) -> None:
    flow = begun(workflow)
    flow.kill()
    lose_nodes(flow, slurm_cluster)
    for name in private_slurm.status(slurm_cluster.plan.folder).dead:
        control.start(slurm_cluster.plan.folder, name)

    made = finished(flow, age)

    assert made == {name: value.replace("new", age) for name, value in NEW.items()}


@pytest.mark.exhaustive
def test_another_working_directory_takes_over_nothing_and_ends_nothing(
    workflow: Make, slurm_cluster: private_slurm.Cluster, tmp_path: Path
) -> None:
    """Two directories of one text on one folder for job files."""
    shared = ("--submitit-folder", str(tmp_path / "jobs"))
    first = workflow("")
    write(first, "old")
    first.start("--config", "value=old", *shared)
    wait_for(lambda: set(started(first)) == set(RULES), "all jobs")
    first.kill()
    other = tmp_path / "other"
    other.mkdir()
    second = Workflow(other, environment(slurm_cluster), "")
    write(second, "old")
    second.touch("go")

    done = second.run("--config", "value=old", *shared)

    assert done.returncode == 0
    assert "taken over" not in done.stdout
    assert started(second) == dict.fromkeys(RULES, 1)
    assert len(first.live_jobs()) == len(RULES)
    first.touch("go")
    assert first.run("--unlock").returncode == 0
    assert first.run("--rerun-incomplete", "--config", "value=old", *shared).returncode == 0
    assert started(first) == dict.fromkeys(RULES, 1)


@pytest.mark.exhaustive
def test_a_directory_made_anew_at_the_same_place_takes_over_nothing(
    workflow: Make, tmp_path: Path
) -> None:
    flow = begun(workflow)
    flow.kill()
    kept = tmp_path.with_name("kept")
    shutil.move(flow.folder / ".snakemake" / "submitit", kept)
    moved = tmp_path.with_name("moved")
    flow.folder.rename(moved)
    flow.folder.mkdir()
    (flow.folder / "runs").mkdir()
    write(flow, "old")
    flow.touch("go")

    done = flow.run("--config", "value=old", "--submitit-folder", str(kept))
    flow.slurm("scancel", "--user", flow.slurm("id", "-un").strip())

    assert done.returncode == 0
    assert started(flow) == dict.fromkeys(RULES, 1)
