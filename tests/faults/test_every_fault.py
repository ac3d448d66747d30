"""Every fault of the scoreboard: cause right, the culprit named and nobody else.

Recordings of all are diagnosed by the code of now; live, in stages that really hang, three run
in `make test` and all in `make test-all`. To record them anew:
`python scripts/scoreboard.py --record tests/data/scoreboard --out docs/scoreboard.md`.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from scoreboard_cases import CASES, Case, Drawn, draw
from scoreboard_record import unpack
from scoreboard_run import judge_again, run_case, write_assets

from shakedown.training.fault_acts import SLOW_SECONDS
from tests.workflow.helpers import processes_that_mention

RECORDINGS = Path(__file__).parents[1] / "data" / "scoreboard"
# One of each kind: a rank that stands, a file system, a role that is gone.
LIVE = (
    "stopped rank",
    "file system stalls",
    "dead orchestrator",
)
SEED = 1  # other ranks and steps than docs/scoreboard.md
STALL_SECONDS = 5.0  # twenty steps
# Without a beat: four ranks that share two cores start in 12, and beside other tests in 26.
START_SECONDS = 50.0


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recorded_fault_is_told_by_its_cause_and_its_culprit(case: Case, tmp_path: Path) -> None:
    then = unpack(case, RECORDINGS, tmp_path)

    now = judge_again(case, Drawn(then.rank, then.step), tmp_path, then)

    assert (now.cause_right, now.exact, now.false_blame) == (True, True, False), now


def test_live_faults_are_cases() -> None:
    assert set(LIVE) <= {case.name for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in LIVE else pytest.mark.exhaustive)
        for case in CASES
    ],
)
def test_fault_is_told_by_its_cause_and_its_culprit(
    case: Case, tmp_path: Path, assets: Path
) -> None:
    folder = tmp_path / "case"  # without its name: paths stand in the logs
    stall = SLOW_SECONDS + 2 if case.kind == "slow_steps" else STALL_SECONDS

    changes = case.changes
    if "start_timeout" in changes:  # a fault in what has this patience
        changes = {**changes, "start_timeout": START_SECONDS}

    found = run_case(replace(case, changes=changes), draw(case, SEED), folder, assets, stall=stall)

    assert (found.cause_right, found.exact, found.false_blame) == (True, True, False), found
    assert not processes_that_mention(str(folder))
