"""Every fault of the scoreboard, for real: cause right, the culprit named and nobody else."""

from dataclasses import replace
from pathlib import Path

import pytest
from scoreboard_cases import CASES, Case, draw
from scoreboard_run import run_case, write_assets

from shakedown.training.fault_acts import SLOW_SECONDS
from tests.workflow.helpers import processes_that_mention

pytestmark = pytest.mark.slow

SEED = 1  # other ranks and steps than docs/scoreboard.md
STALL_SECONDS = 5.0  # twenty steps
START_SECONDS = 20.0  # without a beat; four ranks that share two cores start in 12


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
