"""Files of a stage that hold something else than they should: said, never a crash or a mix-up."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shakedown.cli import main
from shakedown.core.errors import StorageError, UsageError
from shakedown.core.paths import StagePaths
from shakedown.data_sources import RowStream
from shakedown.rollout.batch import RolloutBatch
from shakedown.rollout.queue import find_queue
from shakedown.rollout.store import RolloutStore
from shakedown.training.checkpoint.checkpoints import Meta, find, read_meta
from shakedown.training.stage.results import stage_metrics

PRINT = {"engine": "fsdp"}


def batch(step: int) -> RolloutBatch:
    mask = np.zeros((2, 3), dtype=np.bool_)
    mask[:, 2] = True
    return RolloutBatch(
        step=step,
        versions=np.zeros(2, dtype=np.int64),
        tokens=np.ones((2, 3), dtype=np.int64),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        rewards=np.array([0, 1], dtype=np.float32),
        groups=np.zeros(2, dtype=np.int64),
    )


def test_the_batch_of_another_step_is_refused(tmp_path: Path) -> None:
    exchange = RolloutStore(tmp_path)
    exchange.publish_batch(batch(3))
    exchange.batch_path(3).rename(exchange.batch_path(4))

    with pytest.raises(StorageError, match=r"step_000004.npz is the batch of step 3"):
        exchange.wait_batch(4, timeout=1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": np.full((2, 3), -1)}, "below 0"),
        ({"versions": np.full(2, -1)}, "below 0"),
        (
            {
                "tokens": np.zeros((2, 0), np.int64),
                "loss_mask": np.zeros((2, 0), np.bool_),
                "logprobs": np.zeros((2, 0), np.float32),
            },
            "no tokens",
        ),
    ],
)
def test_a_batch_of_nothing_or_of_no_tokens_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        dataclasses.replace(batch(1), **change).check()


@pytest.mark.parametrize(
    "body",
    ['{"version": "x"}', '{"version": [1]}', '{"version": 1e400}', '{"version": -1}', "{}"]
    + ['{"version": true}', "[" * 100_000, "\x00"],
)
def test_a_damaged_version_is_said(body: str, tmp_path: Path) -> None:
    exchange = RolloutStore(tmp_path)
    for name in ("weights/latest.json", "loaded.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(body, encoding="utf-8")

    for ask in (exchange.latest_version, exchange.latest_weights, exchange.loaded_version):
        with pytest.raises(StorageError, match=r"(latest|loaded)\.json"):
            ask()


def test_a_place_beyond_any_data_set_is_not_gone_on_from(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    body = json.dumps({"next": 10**40, "open": []})
    (tmp_path / "rollouts/step_000002.json").write_text(body, encoding="utf-8")

    kept = find_queue(tmp_path, 2, batch_size=4, async_level=1)

    assert kept.cursor.next == 8
    assert "is not a valid place in the prompts" in kept.messages[0]


def checkpoint(root: Path, step: int, **change: Any) -> Path:
    folder = root / f"step_{step:06d}"
    folder.mkdir()
    meta = dataclasses.asdict(Meta(step, step, 1, PRINT, {})) | change
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {"engine/shard": 10}},
        {"fingerprint": "fsdp"},
        {"data": 5},
        {"updates": -1},
    ]
    + [{"updates": True}, {"world_size": "1"}, {"unknown": 1}],
)
def test_a_checkpoint_with_another_account_of_itself_is_passed_over(
    change: dict[str, Any], tmp_path: Path
) -> None:
    older, newer = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2, **change)

    found = find(tmp_path, PRINT)

    assert found.folder == older
    assert "step_000002 ignored: unreadable meta.json" in found.messages[0]
    assert isinstance(read_meta(newer), str)


def test_a_deep_account_and_folders_of_odd_names_are_passed_over(tmp_path: Path) -> None:
    older, newer = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    (newer / "meta.json").write_text("[" * 100_000, encoding="utf-8")
    for name in ("step_²", "step_٣", "step_-1", "step_", "step_" + "9" * 30):
        (tmp_path / name).mkdir()

    found = find(tmp_path, PRINT)

    assert found.folder == older
    assert len(found.messages) == 1


@pytest.mark.parametrize(
    "change",
    [{"rows": 0}, {"rows": -1}, {"rows": None}, {"rows": 10**30}, {"epoch": -1}, {"window": 1.5}]
    + [{"index": -1}, {"index": True}, {"seed": "x"}, {"seed": -3}],
)
def test_a_damaged_position_in_the_data_is_said(change: dict[str, Any], tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    row = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
    data.write_text(json.dumps(row) + "\n", encoding="utf-8")
    stream = RowStream(str(data), lambda row: row.messages[0]["content"], seed=3)

    with pytest.raises(UsageError, match="is not a position in data"):
        stream.seek(stream.position.to_json() | change)

    assert stream.take(2) == ["1+1=", "1+1="]


@pytest.mark.parametrize("command", ["status", "logs", "report"])
def test_a_path_that_can_be_none_is_a_usage_error(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([command, "x" * 5000])

    told = capsys.readouterr().err
    assert code == 2
    assert "File name too long" in told
    assert "Traceback" not in told


def test_figures_that_are_no_finite_numbers_are_left_out_of_the_outcome(tmp_path: Path) -> None:
    row = '{"step": 2, "loss": 1.5, "grad_norm": NaN, "tokens": 1' + "0" * 400 + ', "lr": "0.1"}\n'
    (tmp_path / "metrics.jsonl").write_text(row, encoding="utf-8")

    assert stage_metrics(StagePaths(tmp_path)) == (2, {"loss": 1.5})


def test_the_outcome_has_the_highest_staleness_of_all_steps(tmp_path: Path) -> None:
    rows = "".join(
        f'{{"step": {step}, "staleness_max": {staleness}}}\n'
        for step, staleness in ((1, 0.0), (2, 2.0), (3, 1.0))
    )
    (tmp_path / "metrics.jsonl").write_text(rows, encoding="utf-8")

    assert stage_metrics(StagePaths(tmp_path)) == (3, {"staleness_max": 2.0})
