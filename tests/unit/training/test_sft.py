"""SFT stages over conversations, in this process, on one rank."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shakedown.config import SftConfig
from shakedown.core.errors import UsageError
from shakedown.training.demo import write_model
from shakedown.training.stage.job import StageJob
from tests.unit.training.test_nan_guard import Rank

LONG = "9" * 30


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of two answers; the last answer of one of them is long."""
    folder = tmp_path_factory.mktemp("chats")
    write_model(folder / "model", seed=0)
    rows = [*(_chat(f"{number}+1=", "7") for number in range(10, 14)), _chat("5+1=", LONG)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _chat(question: str, last: str) -> dict[str, Any]:
    said = [("user", question), ("assistant", "7"), ("user", "again"), ("assistant", last)]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


@pytest.fixture
def rank(assets: Path, tmp_path: Path) -> Rank:
    return Rank(assets, tmp_path)


def _job(rank: Rank, **settings: Any) -> StageJob:
    """Three steps, each over all five conversations."""
    job = rank.job("sft", lr=0.01)
    changes = {"batch_size": 5, "sft": SftConfig(**settings)}
    return replace(job, config=job.config.model_copy(update=changes))


def _steps(job: StageJob) -> list[dict[str, float]]:
    return [json.loads(line) for line in job.paths.metrics.read_text().splitlines()]


def test_all_turns_of_conversations_are_trained(rank: Rank) -> None:
    job = _job(rank)

    assert rank.run(job)

    steps = _steps(job)
    # Both answers of each, the second with <eos>.
    assert [row["trained_tokens"] for row in steps] == [4 * 3 + 1 + len(LONG) + 1] * 3
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]


def test_rows_over_the_longest_are_left_out_and_counted(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    job = _job(rank, max_length=20)

    assert rank.run(job)

    # Five rows a step out of the four that are left, over the end of an epoch.
    assert [row["trained_tokens"] for row in _steps(job)] == [5 * 3] * 3
    assert "1 rows longer than 20 tokens are left out" in capsys.readouterr().out


def test_rows_over_the_longest_are_cut_off_and_counted(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    job = _job(rank, max_length=20, too_long="truncate")

    assert rank.run(job)

    # <bos>5+1= and 7 and again are 11 tokens.
    assert [row["trained_tokens"] for row in _steps(job)] == [4 * 3 + 1 + 9] * 3
    assert "1 rows are cut off at 20 tokens" in capsys.readouterr().out


def test_no_row_that_fits_is_refused(rank: Rank) -> None:
    with pytest.raises(UsageError, match=r"first 5 rows is longer than 4 tokens .*positions: 1024"):
        rank.run(_job(rank, max_length=4))
