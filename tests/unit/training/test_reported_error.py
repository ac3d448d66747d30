"""An error of ours in a rank carries cause and remedy to outcome, gate, diagnosis and report."""

from pathlib import Path

import pytest

from shakedown.core.continued import ProgramCall
from shakedown.core.errors import ConfigError, ShakedownError, StorageError
from shakedown.core.files import write_text
from shakedown.core.outcome import Outcome, judge_outcome
from shakedown.core.paths import RunPaths
from shakedown.diagnosis.diagnose import diagnose_stage
from shakedown.monitor.workflow import WorkflowRun
from shakedown.report.collect import collect
from shakedown.report.summary import headline, workflow_steps
from shakedown.training.nan_guard import DivergedError, finite
from shakedown.training.stage.reported_error import report_error, with_reported_error

COMMAND = "snakemake --configfile mine.yaml"
LOG = """Traceback (most recent call last):
  File "/x/shakedown/training/stage/worker.py", line 59, in main
    return run(read_job(args.job))
  File "/x/shakedown/training/nan_guard.py", line 36, in finite
    raise DivergedError(
shakedown.training.nan_guard.{error}
"""


def diverged() -> DivergedError:
    with pytest.raises(DivergedError) as raised:
        finite(2, {"loss": float("nan")}, stage="sft", lr=1e12)
    return raised.value


@pytest.mark.parametrize(
    ("error", "blame"),
    [
        (diverged(), "user"),
        (ConfigError("no such column: text", hint="name it in data.columns"), "user"),
        (
            StorageError("cannot write /x: No space left on device", hint="free space"),
            "environment",
        ),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else each,
)
def test_what_a_rank_says_of_its_end_reaches_everybody_who_is_asked(
    error: ShakedownError, blame: str, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path)
    WorkflowRun.here("jobs", ProgramCall.snakemake(COMMAND.split()[1:], [], [], Path.cwd())).write(
        paths.workflow
    )
    stage = paths.stage("sft")
    attempt = stage.new_attempt()
    write_text(attempt.log("trainer-rank0"), LOG.format(error=f"{type(error).__name__}: {error}"))
    report_error(attempt, "trainer-rank0", error)
    bare = Outcome(
        "sft", 1, "failed", "trainer-rank0 exited with code 1", failed_component="trainer-rank0"
    )

    outcome = with_reported_error(bare, attempt, stage)
    outcome.write(attempt.outcome)
    diagnosis = diagnose_stage(attempt.root, outcome)
    diagnosis.write(stage.diagnosis)
    gate = judge_outcome(outcome, diagnosis, stage.root)
    view = collect(tmp_path)
    top = headline(view, workflow_steps(view))

    assert str(error.args[0]) in outcome.sentence
    assert str(error.args[0]) in gate.summary
    assert {outcome.next, gate.next, top.next} == {f"{error.hint}, then: {COMMAND}"}
    assert top.remedy == error.hint
    assert (diagnosis.findings[0].blame, outcome.findings[0].blame) == (blame, blame)
    if isinstance(error, DivergedError):
        assert diagnosis.extra["diagnosis"]["cause"] == "diverged"
        assert diagnosis.extra["diagnosis"]["culprits"]["ranks"] == []
        assert "stages.sft.optimizer.lr (now 1e+12)" in outcome.next


def test_an_attempt_that_left_no_word_keeps_its_outcome(tmp_path: Path) -> None:
    stage = RunPaths(tmp_path).stage("sft")
    attempt = stage.new_attempt()
    bare = Outcome("sft", 1, "failed", "broken", failed_component="trainer-rank0")

    write_text(attempt.error("trainer-rank0"), "{")

    assert with_reported_error(bare, attempt, stage) == bare
