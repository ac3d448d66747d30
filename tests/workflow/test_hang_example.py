"""The hang example: one sentence, the culprit rank and line, and a rerun of that stage alone."""

import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import yaml

from shakedown.core.paths import RunPaths
from tests.workflow.helpers import ROOT, Demo, Run, processes_that_mention, read_json

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

EXAMPLE = ROOT / "config" / "examples" / "hang.yaml"
# Less work before the hang and after it, and more patience: other tests share the cores, and an
# answer of the server has taken 13 s.
SMALL = {"stages": {"grpo": {"steps": 6, "eval_samples": 32, "stall_timeout": 40.0}}}
Hang = tuple[RunPaths, subprocess.CompletedProcess[str], Path, Path]


@pytest.fixture(scope="module")
def hang(demo: Demo, run_workflow: Run, tmp_path_factory: pytest.TempPathFactory) -> Hang:
    """The example's run up to its last stage, all before it taken over from a copy of the demo."""
    folder = tmp_path_factory.mktemp("hang")
    paths = RunPaths(folder / "hang")
    shutil.copytree(demo[0].root, paths.root, symlinks=True)
    shutil.rmtree(paths.stage("grpo").root)
    small = folder / "small.yaml"
    small.write_text(yaml.safe_dump({**SMALL, "results": str(folder)}), encoding="utf-8")
    example = folder / "hang.yaml"
    example.write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    done = run_workflow("--configfile", str(example), str(small))
    return paths, done, small, example


def test_run_ends_with_exit_code_1_and_one_sentence(hang: Hang) -> None:
    _, done, _, _ = hang

    assert done.returncode == 1
    sentences = [line for line in done.stdout.splitlines() if "accept grpo: FAIL" in line]
    assert len(sentences) == 1
    assert "rank 1" in sentences[0]
    assert "Error in rule accept_stage" in done.stdout
    assert "MissingOutputException" not in done.stdout


def test_diagnosis_names_rank_and_line(hang: Hang) -> None:
    paths, _, _, _ = hang

    verdict = read_json(paths.stage("grpo").diagnosis)
    diagnosis = verdict["diagnosis"]

    assert diagnosis["state"] == "hung"
    assert diagnosis["cause"] == "conditional_collective"
    assert diagnosis["pattern"] == "B"
    assert diagnosis["culprits"]["ranks"] == [1]
    assert "fault_acts.py:" in verdict["summary"]
    assert paths.stage("grpo").diagnosis_html.stat().st_size > 0


def test_report_is_written_although_a_stage_failed(hang: Hang) -> None:
    paths, _, _, _ = hang

    assert "grpo" in paths.report.read_text(encoding="utf-8")


def test_no_process_outlives_the_hung_stage(hang: Hang) -> None:
    paths, _, _, _ = hang

    assert not processes_that_mention(str(paths.root))


def test_same_command_without_the_fault_reruns_that_stage_from_its_checkpoint(
    hang: Hang, run_workflow: Run
) -> None:
    paths, _, small, example = hang
    before = {
        path: path.stat().st_mtime_ns for path in (paths.agents.verdict, paths.stage("sft").outcome)
    }
    body = yaml.safe_load(example.read_text(encoding="utf-8"))
    del body["stages"]["grpo"]["fault"]
    example.write_text(yaml.safe_dump(body), encoding="utf-8")

    done = run_workflow("--configfile", str(example), str(small))

    assert done.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert paths.stage("grpo").attempt_numbers() == [1, 2]
    log = paths.stage("grpo").attempt(2).log("trainer-rank0").read_text(encoding="utf-8")
    assert "resuming from" in log
    table = pd.read_json(paths.stage("grpo").metrics, lines=True)
    assert list(table["step"]) == [1, 2, 3, 4, 5, 6]
