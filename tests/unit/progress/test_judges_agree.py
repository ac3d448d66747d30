"""The same signs by every way that a job is judged: they stand still for all judges, or for none.

A rank whose steps took `step` seconds has given no sign for `age` seconds.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shakedown.diagnosis.analyze.rules import analyze
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths
from shakedown.monitor.attach.judge import Judge
from shakedown.progress.movement import MoveState, Watch
from shakedown.progress.patience import CONFIRM_SECONDS, FACTOR, SHORTEST, WARN_SHARE, Patience
from shakedown.progress.signs import Activity, Beat, signs_between
from shakedown.report.live import LiveJob, warnings
from tests.unit.diagnosis.test_rules_live import NOW, job
from tests.unit.monitor.attach.looks import Rank, looks_at

# Nobody was given a time-out that is longer than what the steps teach.
PATIENCE = Patience(step=SHORTEST, phase=300.0, life=SHORTEST, work=SHORTEST)
LOOK = 1.0  # seconds between two looks


def times(until: float) -> Iterator[float]:
    yield from (LOOK * number for number in range(round(until / LOOK) + 1))


def beat(step: int, phase: str = "train", count: int = 0, wall: float = 0.0) -> Beat:
    return Beat("trainer", 0, 9, "n1", phase, step, 0, 4, count or step, wall, 0.0)


def by_stage(step: float, age: float, phase: str, _folder: Path) -> MoveState:
    """The supervisor of a stage, by heartbeats."""
    watch, last = Watch(PATIENCE), 4 * step
    for now in times(last):
        watch.observe([beat(1 + int(now / step))], now)
    for now in times(age):
        seen = watch.observe([beat(5, phase, 6)], last + now)
    return "still" if seen.still else "moves"


def by_status(step: float, age: float, phase: str, _folder: Path) -> MoveState:
    """`shakedown status`, once, which warns at its share of the patience."""
    told = warnings([beat(5, phase, wall=NOW - WARN_SHARE * age)], LiveJob(PATIENCE), NOW, (), step)
    return "still" if told else "moves"


def by_diagnosis(step: float, age: float, phase: str, folder: Path) -> MoveState:
    """`shakedown hang`, by heartbeats that a collector has read, and a log that tells of steps."""
    rows = "".join(json.dumps({"step": n, "step_seconds": step}) + "\n" for n in range(9))
    (job(folder / "evidence", age=age, phase=phase) / "train.log").write_text(rows)
    chosen = analyze(build_facts(read_paths([folder]).records)).chosen
    return "still" if chosen.state == "hung" else "moves"


def by_watch(step: float, age: float, _phase: str, _folder: Path) -> MoveState:
    """`shakedown watch` of processes that print once a step, and do nothing else."""
    judge, rank, last = Judge(PATIENCE), Rank(0), 4 * step
    for now in times(last + age):
        rank.output = 10 * int(min(now, last) / step)
        seen = judge.observe(looks_at([rank], now), now)
    return "still" if seen.state == "suspect" else "moves"


JUDGES = [by_stage, by_status, by_diagnosis, by_watch]


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("step", [2.0, 20.0])
@pytest.mark.parametrize(("share", "state"), [(0.8, "moves"), (1.2, "still")])
def test_a_rank_stands_still_after_the_patience_that_its_steps_teach(
    judge: Callable[..., MoveState], step: float, share: float, state: MoveState, tmp_path: Path
) -> None:
    allowed = max(FACTOR * step, SHORTEST)

    assert judge(step, round(share * allowed), "train", tmp_path) == state


@pytest.mark.parametrize("judge", [by_stage, by_status, by_diagnosis])
@pytest.mark.parametrize("phase", ["init", "compile", "checkpoint", "eval"])
@pytest.mark.parametrize(("step", "allowed"), [(2.0, 300.0), (120.0, 360.0)])
def test_a_long_phase_has_the_patience_of_a_start_and_never_less_than_a_step(
    judge: Callable[..., MoveState], phase: str, step: float, allowed: float, tmp_path: Path
) -> None:
    assert judge(step, allowed - 20, phase, tmp_path / "within") == "moves"
    assert judge(step, allowed + 20, phase, tmp_path / "after") == "still"


@pytest.mark.parametrize("judge", [by_stage, by_status])
def test_a_component_that_has_finished_never_stands_still(
    judge: Callable[..., MoveState], tmp_path: Path
) -> None:
    assert judge(2.0, 9999.0, "finished", tmp_path) == "moves"


def test_an_evaluation_that_counts_on_moves_for_the_stage_and_for_a_diagnosis(
    tmp_path: Path,
) -> None:
    """Its step stands, each token beats; for a rank that waits a repeated beat is none."""
    for phase, state in (("eval", "moves"), ("rollout_wait", "still")):
        folder, watch = job(tmp_path / phase, age=1.0, phase=phase), Watch(PATIENCE)
        for number in (1, 2):
            path = folder / f"round{number}" / "beats-n1.json"
            body = json.loads(path.read_text())
            body["beats"][1]["count"] += number
            path.write_text(json.dumps(body))
        for now in times(400.0):
            seen = watch.observe([beat(5, phase, int(now))], now)
        chosen = analyze(build_facts(read_paths([folder]).records)).chosen

        assert ("still" if seen.still else "moves") == state
        assert ("moves" if chosen.state == "slow" else "still") == state


def test_what_a_process_did_between_two_looks_is_the_same_for_all() -> None:
    first = Activity(100.0, 3.0, 900, 40)

    assert signs_between(first, Activity(110.0, 3.2, 900, 40)) == set()
    assert signs_between(first, Activity(110.0, 9.0, 901, 41)) == {"printed", "moved", "computed"}
    assert CONFIRM_SECONDS < SHORTEST < PATIENCE.of("phase")
