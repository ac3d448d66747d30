"""Which checkpoint is taken, how one is written, what must match, the metrics after a resume."""

import json
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shakedown.config import FaultConfig, OptimizerConfig, StageConfig
from shakedown.core.errors import RefusedError, StorageError
from shakedown.core.folders import publish_folder
from shakedown.core.lease import hold
from shakedown.training.checkpoint.checkpoints import Checkpoints, FoundCheckpoint, find, read_meta
from shakedown.training.checkpoint.fingerprint import differences, fingerprint
from shakedown.training.checkpoint.random_state import load_random, random_state
from shakedown.training.checkpoint.writing import Saving
from shakedown.training.coordination import Ranks
from shakedown.training.demo import write_model
from shakedown.training.engines.fsdp import FsdpEngine
from shakedown.training.metrics.record import MetricsLog
from shakedown.training.stage.job import StageJob
from tests.megatron_ranks import save_now
from tests.no_room import no_room

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
        "files": {"engine/shard": {"size": 10}},
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def _taken(found: FoundCheckpoint) -> str:
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
    assert find(tmp_path / "missing", OURS) == FoundCheckpoint(None, None, [])


@pytest.mark.parametrize(
    "damage",
    ["no meta", "half meta", "short file", "lost file", "other meta", "other step", "no list"],
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
    elif damage == "other step":
        text = (broken / "meta.json").read_text(encoding="utf-8")
        (broken / "meta.json").write_text(text.replace('"step": 100', '"step": 101'))
    elif damage == "no list":
        text = (broken / "meta.json").read_text(encoding="utf-8")
        (broken / "meta.json").write_text(text.replace('{"engine/shard": {"size": 10}}', "null"))
    elif damage == "short file":
        (broken / "engine" / "shard").write_bytes(b"x" * 9)
    else:
        (broken / "engine" / "shard").unlink()

    found = find(tmp_path, OURS)

    assert _taken(found) == "step_000050"
    assert len(found.messages) == 1
    assert "step_000100 ignored" in found.messages[0]


def test_a_checkpoint_of_another_configuration_is_refused_and_says_why(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 100, seed="5")

    found = find(tmp_path, OURS)

    assert found.folder is None
    assert "seed: 5 there, 0 here" in found.messages[0]


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
        {"allocation": "fsdp[trainer]:d2t1"},
        {"checkpoint_every": 7},
        {"micro_batch_size": 2},
        {"max_tokens_per_micro_batch": 64},
        {"stall_timeout": 5.0},
        {"optimizer": OptimizerConfig(lr=0.1, warmup_steps=3, weight_decay=0.1)},
        {"optimizer": OptimizerConfig(lr=0.001, max_grad_norm=0.1)},
    ],
    ids=str,
)
def test_what_does_not_shape_the_state_may_change(
    tmp_path: Path, change: dict[str, object]
) -> None:
    assert differences(fingerprint(_job(tmp_path)), fingerprint(_job(tmp_path, **change))) == []


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 16},
        {"optimizer": OptimizerConfig(lr=0.001, betas=(0.8, 0.9))},
        {"allocation": "megatron:d2"},
    ],
    ids=str,
)
def test_what_shapes_the_state_must_match(tmp_path: Path, change: dict[str, object]) -> None:
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


def test_metrics_for_which_there_is_no_room_are_a_storage_error(tmp_path: Path) -> None:
    with no_room(), pytest.raises(StorageError, match="File too large"):
        MetricsLog(tmp_path / "metrics.jsonl").append({"step": 1})


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


def test_another_engine_is_named_and_a_checkpoint_that_says_none_stays_usable(
    tmp_path: Path,
) -> None:
    ours = fingerprint(_job(tmp_path))
    theirs = fingerprint(_job(tmp_path, allocation="megatron:d2"))
    older = {name: value for name, value in theirs.items() if name != "engine"}

    assert differences(ours, theirs) == ["engine: megatron there, fsdp here"]
    assert differences(ours, older) == []


def test_a_key_that_came_later_leaves_older_checkpoints_usable_while_it_has_its_default(
    tmp_path: Path,
) -> None:
    ours = fingerprint(_job(tmp_path))
    changed = fingerprint(_job(tmp_path, optimizer=OptimizerConfig(lr=0.001, betas=(0.8, 0.9))))
    older = {name: value for name, value in ours.items() if name != "optimizer.betas"}
    without_seed = {name: value for name, value in ours.items() if name != "seed"}

    assert differences(ours, older) == []
    assert differences(changed, older) == ["optimizer.betas: nothing there, [0.8, 0.9] here"]
    assert differences(ours, without_seed) == ["seed: nothing there, 0 here"]
    assert differences(older, changed) == ["optimizer.betas: [0.8, 0.9] there, nothing here"]


class Paper:
    """An engine whose state is one text; it writes when it is let, and fails when it is told."""

    def __init__(self) -> None:
        self.text, self.updates, self.fault = "first", 0, ""
        self.may_write = threading.Event()
        self.may_write.set()

    def snapshot(self) -> "Sheet":
        return Sheet(self, self.text)

    def load(self, folder: Path, *, updates: int) -> None:
        self.text, self.updates = (folder / "text").read_text(encoding="utf-8"), updates


class Sheet:
    def __init__(self, paper: Paper, text: str) -> None:
        self._paper, self._text = paper, text

    def write(self, folder: Path) -> Sequence[Path]:
        self._paper.may_write.wait(30)
        if self._paper.fault == "disk":
            raise StorageError("No space left on device")
        if self._paper.fault:
            raise KeyError(self._paper.fault)
        folder.mkdir()
        (folder / "text").write_text(self._text, encoding="utf-8")
        return [folder / "text"]

    def complete(self, folder: Path) -> None:
        (folder / "completed").write_text("done", encoding="utf-8")


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """A process group of one rank."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Ranks(store, device=torch.device("cpu"), key=b"key")
    dist.destroy_process_group()


@pytest.fixture
def paper() -> Iterator[Paper]:
    paper = Paper()
    yield paper
    paper.may_write.set()


def _checkpoints(root: Path, paper: Any, ranks: Ranks, **more: Any) -> Checkpoints:
    return Checkpoints(root, engine=paper, ranks=ranks, fingerprint=OURS, **{"keep": 2, **more})


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_writer_whose_folder_was_taken_over_adds_no_row_and_no_checkpoint(
    tmp_path: Path, paper: Paper, alone: Ranks
) -> None:
    with hold(tmp_path, "an attempt") as mine:
        log = MetricsLog(tmp_path / "metrics.jsonl", fence=mine.check)
        checkpoints = _checkpoints(tmp_path / "checkpoints", paper, alone, fence=mine.check)
        log.append({"step": 4})
        checkpoints.begin(4)
    with hold(tmp_path, "the next attempt"):
        with pytest.raises(StorageError, match="has been taken over"):
            checkpoints.wait()
        for write in (lambda: log.append({"step": 5}), lambda: log.keep_until(0)):
            with pytest.raises(RefusedError, match="its lease is number 2, this one's was 1"):
                write()

    assert not any(name.startswith("step_") for name in _names(tmp_path / "checkpoints"))
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == '{"step": 4}\n'


def test_a_checkpoint_appears_at_the_first_step_after_it_is_written_with_the_state_of_its_own(
    tmp_path: Path, paper: Paper, alone: Ranks
) -> None:
    checkpoints = _checkpoints(tmp_path, paper, alone)
    paper.may_write.clear()

    checkpoints.begin(4, data={"row": 7}, attach=lambda folder: (folder / "more").mkdir())
    paper.text = "second"
    sums = checkpoints.flags() | {"loss": 1.0}
    checkpoints.agree(sums)
    during = _names(tmp_path)
    paper.may_write.set()
    checkpoints.wait()

    assert sums == {"loss": 1.0}
    assert during == [".writing-step_000004"]
    assert _names(tmp_path) == ["latest", "step_000004"]
    found = find(tmp_path, OURS)
    assert found.meta is not None
    assert set(found.meta.files) == {"engine/text", "engine/completed", "rng-rank0.pt"}
    assert (found.meta.step, found.meta.data) == (4, {"row": 7})
    assert (tmp_path / "step_000004/engine/text").read_text() == "first"


@pytest.mark.parametrize("name", ["engine/text", "engine/completed", "rng-rank0.pt", "meta.json"])
def test_a_changed_bit_is_found_and_the_checkpoint_before_is_taken_even_of_two_that_are_kept(
    tmp_path: Path, paper: Paper, alone: Ranks, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def attach(folder: Path) -> None:
        (folder / "attached").write_bytes(b"a")

    checkpoints = _checkpoints(tmp_path, paper, alone)
    for step, text in ((3, "third"), (6, "sixth")):
        paper.text = text
        checkpoints.begin(step, attach=attach)
        checkpoints.wait()
    (tmp_path / "step_000003/attached").write_bytes(b"b")  # its own reader looks after it
    whole = (tmp_path / "step_000006" / name).read_bytes()
    half = len(whole) // 2
    changed = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
    (tmp_path / "step_000006" / name).write_bytes(changed)

    resumed = _checkpoints(tmp_path, paper, alone).resume()

    assert (resumed, paper.text) == (3, "third")
    assert "checkpoint step_000006 ignored: " in capsys.readouterr().out
    assert _names(tmp_path) == ["damaged-step_000006", "latest", "step_000003"]
    assert (tmp_path / "damaged-step_000006" / name).read_bytes() == changed


def test_a_damaged_checkpoint_that_is_the_only_one_is_kept_and_training_starts_anew(
    tmp_path: Path, paper: Paper, alone: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = _checkpoints(tmp_path, paper, alone, keep=1)
    for step in (1, 2):
        checkpoints.begin(step)
        checkpoints.wait()
    only = _names(tmp_path)
    (tmp_path / "step_000002/engine/text").write_bytes(b"worst")

    again = _checkpoints(tmp_path, paper, alone, keep=1)
    resumed = again.resume()
    again.begin(2)
    again.wait()

    assert only == ["latest", "step_000002"]
    assert resumed == 0
    assert (
        "step_000002 ignored: damaged, engine/text has changed since it was written (checksum)\n"
        "starting from the input model"
    ) in capsys.readouterr().out
    assert _names(tmp_path) == ["damaged-step_000002", "latest", "step_000002"]


def test_a_checkpoint_appears_without_another_step_once_its_row_is_logged(
    tmp_path: Path, paper: Paper, alone: Ranks
) -> None:
    checkpoints = _checkpoints(tmp_path, paper, alone)

    checkpoints.begin(4)
    checkpoints.logged(3)
    before = _names(tmp_path)
    checkpoints.logged(4)
    for thread in [t for t in threading.enumerate() if t.name == "checkpoint"]:
        thread.join(30)

    assert before == [".writing-step_000004"]
    assert _names(tmp_path) == ["latest", "step_000004"]


def test_a_new_checkpoint_waits_for_the_one_before_and_the_newest_stay(
    tmp_path: Path, paper: Paper, alone: Ranks
) -> None:
    checkpoints = _checkpoints(tmp_path, paper, alone, keep=2)

    for step in (1, 2, 3):
        checkpoints.begin(step)
    before = _names(tmp_path)
    checkpoints.wait()

    assert before == [".writing-step_000003", "latest", "step_000001", "step_000002"]
    assert _names(tmp_path) == ["latest", "step_000002", "step_000003"]


@pytest.mark.parametrize(
    ("fault", "words"), [("disk", "rank 0: No space left"), ("a bug", "rank 0: KeyError: 'a bug'")]
)
def test_a_write_that_fails_in_its_thread_ends_the_step_and_older_checkpoints_stay(
    tmp_path: Path, paper: Paper, alone: Ranks, fault: str, words: str
) -> None:
    checkpoints = _checkpoints(tmp_path, paper, alone)
    checkpoints.begin(1)
    checkpoints.wait()
    paper.fault = fault
    checkpoints.begin(2)

    with pytest.raises(StorageError, match=words):
        checkpoints.wait()

    assert _taken(find(tmp_path, OURS)) == "step_000001"
    assert checkpoints.flags() == {"_writing": 0.0, "_unwritten": 0.0}
    assert not [t for t in threading.enumerate() if t.name == "checkpoint"]


def test_what_was_cut_off_while_it_was_written_is_removed_with_a_message(
    tmp_path: Path, paper: Paper, alone: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".writing-step_000009/engine").mkdir(parents=True)
    (tmp_path / ".writing").mkdir()

    assert _checkpoints(tmp_path, paper, alone).resume() == 0

    assert (
        ".writing-step_000009 was cut off before it was whole: removed" in capsys.readouterr().out
    )
    assert _names(tmp_path) == []


def test_a_rank_that_fails_elsewhere_leaves_a_whole_checkpoint_or_none(
    tmp_path: Path, paper: Paper, alone: Ranks
) -> None:
    checkpoints = _checkpoints(tmp_path, paper, alone)
    checkpoints.begin(1)
    checkpoints.leave(1)
    checkpoints.begin(2)
    checkpoints.leave(1)  # its row of metrics is not there
    paper.fault = "disk"
    checkpoints.begin(3)
    checkpoints.leave(3)
    checkpoints.leave(3)  # nothing is left to do

    assert _taken(find(tmp_path, OURS)) == "step_000001"
    assert {".writing-step_000002", ".writing-step_000003"} <= set(_names(tmp_path))


def test_a_rank_that_has_not_written_is_waited_for_and_a_part_that_changed_is_refused(
    tmp_path: Path, paper: Paper
) -> None:
    sheet = paper.snapshot()
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    published: list[Saving] = []
    of_two = Saving(tmp_path / "two", sheet, rank=0, world_size=2, publish=published.append)
    alone = Saving(tmp_path / "one", sheet, rank=0, world_size=1, publish=published.append)
    for saving in (of_two, alone):
        saving.allow()
    alone.join(30)
    of_two.join(0.2)
    waiting = of_two.writing
    of_two.abandon()
    of_two.join(30)

    (tmp_path / "one/engine/text").write_text("cut", encoding="utf-8")

    assert (waiting, of_two.writing) == (True, False)
    assert published == [alone]
    with pytest.raises(StorageError, match="text has 3 bytes, its rank wrote 5"):
        alone.complete()
    with pytest.raises(StorageError, match="cannot read part of a checkpoint"):
        of_two.complete()


@pytest.mark.usefixtures("alone")
def test_the_copy_of_a_model_does_not_follow_the_training(tmp_path: Path) -> None:
    write_model(tmp_path / "model", seed=0)
    settings = OptimizerConfig(lr=0.1)
    device = torch.device("cpu")
    model = tmp_path / "model"
    engine = FsdpEngine.build(model, optimizer=settings, dtype="float32", device=device)
    before = {name: tensor.clone() for name, tensor in engine.gather().items()}
    first = engine.snapshot()
    first.write(tmp_path / "first")
    first.complete(tmp_path / "first")
    for parameter in engine._parameters:
        parameter.data.add_(1.0)

    save_now(engine, tmp_path / "second")

    for name, shift in (("first", 0.0), ("second", 1.0)):
        engine.load(tmp_path / name, updates=0)
        found = engine.gather()
        assert all(torch.equal(found[key], before[key] + shift) for key in before), name
    assert sorted(p.name for p in (tmp_path / "first").iterdir()) == [".metadata", "__0_0.distcp"]


def test_random_draws_go_on_in_torch_numpy_and_python(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    draw()
    (tmp_path / "rng.pt").write_bytes(random_state())
    expected = draw()
    draw()

    load_random(tmp_path / "rng.pt")

    assert draw() == expected


def test_random_states_of_an_older_checkpoint_and_damaged_ones(tmp_path: Path) -> None:
    torch.save({"cpu": torch.get_rng_state()}, tmp_path / "older.pt")
    expected = float(torch.rand(()))
    (tmp_path / "damaged.pt").write_bytes(random_state()[:-200])

    load_random(tmp_path / "older.pt")

    assert float(torch.rand(())) == expected
    with pytest.raises(StorageError, match="cannot read the random states"):
        load_random(tmp_path / "damaged.pt")
    with pytest.raises(StorageError, match="cannot read the random states"):
        load_random(tmp_path / "none.pt")
