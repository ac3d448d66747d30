"""The command that goes on with a run: the one that began it, with its files in their order."""

import os
import shlex
from pathlib import Path

import pytest

from shakedown.core.continued import (
    ProgramCall,
    begin_command,
    cluster_command,
    next_command,
    note_stage_command,
    restart_command,
    stage_command,
)
from shakedown.core.files import write_text
from shakedown.core.outcome import Outcome, judge_outcome
from shakedown.core.paths import RunPaths
from shakedown.monitor.workflow import WorkflowRun

TARGET = "results/mine/stages/grpo/accepted.json"
WORDS = [TARGET, "--profile", "profiles/slurm", "-F", "--configfile", "b.yaml", "my a.yaml"]


def begin(run: Path, words: list[str], folder: Path) -> None:
    overlays = [Path("config/config.yaml"), Path("b.yaml"), Path("my a.yaml")]
    command = ProgramCall.snakemake(words, overlays, [TARGET], folder)
    WorkflowRun.here("jobs", command).write(RunPaths(run).workflow)


def test_a_run_goes_on_by_the_command_that_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, WORDS, Path.cwd())
    options = "--profile profiles/slurm --configfile b.yaml 'my a.yaml'"

    assert next_command(tmp_path) == f"snakemake {TARGET} {options}"
    assert next_command(tmp_path, further=True) == f"snakemake {options}"
    failed = judge_outcome(
        Outcome("grpo", 1, "failed", "broken"), None, RunPaths(tmp_path).stage("grpo").root
    )
    assert failed.next == f"fix the cause, then: snakemake {TARGET} {options}"

    begun_in = Path.cwd()
    monkeypatch.chdir(tmp_path)
    assert next_command(tmp_path).startswith(f"cd {shlex.quote(str(begun_in))} && snakemake ")


def test_what_forces_a_rule_is_not_said_again_and_a_profile_of_the_shell_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "profiles/slurm")
    begin(tmp_path, ["--forceall", "-R", "train", "serve", "--cores", "2"], Path.cwd())

    assert next_command(tmp_path) == "snakemake --profile profiles/slurm --cores 2"


def test_a_run_without_a_record_goes_on_with_its_resolved_config_and_never_with_the_demo(
    tmp_path: Path,
) -> None:
    assert next_command(tmp_path) == ""

    write_text(RunPaths(tmp_path).config, "run: mine\n")

    assert next_command(tmp_path) == f"snakemake --configfile {RunPaths(tmp_path).config}"


@pytest.mark.parametrize("damage", ["{", "[]", '{"schema": "shakedown/workflow/1"}', "writable"])
def test_a_record_that_is_damaged_or_that_others_can_write_says_nothing(
    damage: str, tmp_path: Path
) -> None:
    begin(tmp_path, WORDS, Path.cwd())
    path = RunPaths(tmp_path).workflow
    if damage == "writable":
        os.chmod(path, 0o620)
    else:
        path.write_text(damage)

    assert next_command(tmp_path) == ""


def test_a_stage_that_was_run_alone_goes_on_alone(tmp_path: Path) -> None:
    stage = RunPaths(tmp_path).stage("sft")
    overlays = [Path("a.yaml"), Path("b.yaml")]
    words = ["train", "sft", "--restart", "--config", "a.yaml", "b.yaml"]
    note_stage_command(stage, words, overlays)

    assert stage_command(stage) == "shakedown train sft --config a.yaml b.yaml"
    assert restart_command(stage) == "shakedown train sft --config a.yaml b.yaml --restart"
    expected = "snakemake --profile profiles/slurm --configfile a.yaml b.yaml"
    assert cluster_command(stage) == expected
    begin(tmp_path, WORDS, Path.cwd())
    assert stage_command(stage).startswith("snakemake ")


def test_config_files_stand_last_in_their_order() -> None:
    assert begin_command([Path("b.yaml"), Path("a.yaml")], "--cores", "2") == (
        "snakemake --cores 2 --configfile b.yaml a.yaml"
    )
