"""Which checkpoint is taken, what must match, and the metrics file after a resume. No ranks."""

import json
from pathlib import Path

import pytest

from shakedown.config import FaultConfig, OptimizerConfig, StageConfig
from shakedown.errors import StorageError
from shakedown.training.checkpoint import Found, find, read_meta
from shakedown.training.fingerprint import differences, fingerprint
from shakedown.training.folders import publish_folder
from shakedown.training.job import StageJob
from shakedown.training.metrics import MetricsLog

OURS = {"seed": "0", "optimizer.lr": "0.001"}


def _checkpoint(root: Path, step: int, **changes: str) -> Path:
    folder = root / f"step_{step:06d}"
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "shard").write_bytes(b"x" * 10)
    meta = {
        "step": step,
        "updates": step,
        "world_size": 2,
        "fingerprint": OURS | {k.replace("__", "."): v for k, v in changes.items()},
        "files": {"engine/shard": 10},
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def _taken(found: Found) -> str:
    return found.folder.name if found.folder else ""


def test_the_newest_checkpoint_is_taken(tmp_path: Path) -> None:
    for step in (50, 100, 8):
        _checkpoint(tmp_path, step)

    found = find(tmp_path, OURS)

    assert _taken(found) == "step_000100"
    assert found.meta is not None
    assert found.meta.step == 100
    assert found.messages == []


def test_no_checkpoint_means_a_fresh_start_without_messages(tmp_path: Path) -> None:
    assert find(tmp_path / "missing", OURS) == Found(None, None, [])


@pytest.mark.parametrize(
    "damage", ["no meta", "half meta", "short file", "lost file", "other meta"]
)
def test_a_cut_off_checkpoint_is_passed_over_with_a_message(tmp_path: Path, damage: str) -> None:
    _checkpoint(tmp_path, 50)
    broken = _checkpoint(tmp_path, 100)
    if damage == "no meta":
        (broken / "meta.json").unlink()
    elif damage == "half meta":
        (broken / "meta.json").write_text('{"step": 100, "upd', encoding="utf-8")
    elif damage == "other meta":
        (broken / "meta.json").write_text('{"surprise": 1}', encoding="utf-8")
    elif damage == "short file":
        (broken / "engine" / "shard").write_bytes(b"x" * 9)
    else:
        (broken / "engine" / "shard").unlink()

    found = find(tmp_path, OURS)

    assert _taken(found) == "step_000050"
    assert len(found.messages) == 1
    assert "step_000100 ignored" in found.messages[0]


def test_a_checkpoint_of_another_configuration_is_refused_and_says_why(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 100, optimizer__lr="0.5")

    found = find(tmp_path, OURS)

    assert found.folder is None
    assert "optimizer.lr: 0.5 there, 0.001 here" in found.messages[0]


def test_an_own_checkpoint_behind_a_foreign_one_is_taken(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 50)
    _checkpoint(tmp_path, 100, seed="1")

    assert _taken(find(tmp_path, OURS)) == "step_000050"


def test_a_folder_without_meta_is_described(tmp_path: Path) -> None:
    (tmp_path / "step_000001").mkdir()

    assert "cut off" in str(read_meta(tmp_path / "step_000001"))


def _job(folder: Path, **changes: object) -> StageJob:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    for name, body in (("config.json", b"{}"), ("model.safetensors", b"weights")):
        if not (model / name).exists():
            (model / name).write_bytes(body)
    (folder / "train.jsonl").write_text("{}\n", encoding="utf-8")
    config = StageConfig(
        algorithm="sft",
        allocation="fsdp:d2",
        steps=10,
        batch_size=8,
        optimizer=OptimizerConfig(lr=0.001),
    )
    return StageJob(
        stage="sft",
        config=config.model_copy(update=changes),
        model=str(model),
        dtype="float32",
        train=str(folder / "train.jsonl"),
        heldout="",
        reward="exact_match",
        seed=0,
        world_size=2,
        stage_root=str(folder),
        attempt_root=str(folder),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 99},
        {"fault": FaultConfig(kind="kill_rank")},
        {"debug": "detail"},
        {"allocation": "fsdp:d1"},
        {"checkpoint_every": 7},
        {"micro_batch_size": 2},
        {"stall_timeout": 5.0},
    ],
    ids=str,
)
def test_what_does_not_change_the_training_may_change(
    tmp_path: Path, change: dict[str, object]
) -> None:
    assert differences(fingerprint(_job(tmp_path)), fingerprint(_job(tmp_path, **change))) == []


@pytest.mark.parametrize(
    "change", [{"batch_size": 16}, {"optimizer": OptimizerConfig(lr=0.1)}], ids=str
)
def test_what_changes_the_training_must_match(tmp_path: Path, change: dict[str, object]) -> None:
    assert differences(fingerprint(_job(tmp_path)), fingerprint(_job(tmp_path, **change)))


def test_other_weights_under_the_same_path_are_noticed(tmp_path: Path) -> None:
    before = fingerprint(_job(tmp_path))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"WEIGHTS")

    named = differences(before, fingerprint(_job(tmp_path)))

    assert [text.split(":")[0] for text in named] == ["model"]


def test_other_weights_are_noticed_at_the_end_of_a_large_file(tmp_path: Path) -> None:
    job = _job(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"0" * 3_000_000 + b"1")
    before = fingerprint(job)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"0" * 3_000_000 + b"2")

    assert differences(before, fingerprint(job))


def test_metrics_past_the_checkpoint_and_a_cut_off_row_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, 8)]
    path.write_text("\n".join(rows) + '\n{"step": 8, "lo', encoding="utf-8")
    log = MetricsLog(path)

    dropped = log.keep_until(5)
    log.append({"step": 6, "loss": 0.5})

    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert dropped == 3
    assert [row["step"] for row in kept] == [1, 2, 3, 4, 5, 6]


def test_metrics_start_empty_where_there_was_no_file(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "deeper" / "metrics.jsonl")

    log.keep_until(0)
    log.append({"step": 1})

    assert (tmp_path / "deeper" / "metrics.jsonl").read_text(encoding="utf-8") == '{"step": 1}\n'


def test_metrics_on_a_full_disk_are_a_storage_error() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")

    with pytest.raises(StorageError, match="No space left"):
        MetricsLog(full).append({"step": 1})


def test_a_published_folder_replaces_the_old_one_whole(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name, encoding="utf-8")

    publish_folder(tmp_path / "old", tmp_path / "model")
    publish_folder(tmp_path / "new", tmp_path / "model")

    assert [p.name for p in (tmp_path / "model").iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_place_in_the_data_is_read_back_and_older_checkpoints_have_none(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, 50)
    older = read_meta(folder)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    place = {"seed": 0, "rows": 16, "epoch": 1, "window": 2, "index": 3}
    (folder / "meta.json").write_text(json.dumps(meta | {"data": place}), encoding="utf-8")

    newer = read_meta(folder)

    assert not isinstance(older, str)
    assert not isinstance(newer, str)
    assert (older.data, newer.data) == ({}, place)
