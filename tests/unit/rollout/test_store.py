"""Batches and weights on disk: whole or not there."""

import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shakedown.core.errors import CannotJudgeError, StorageError, UsageError
from shakedown.rollout.batch import RolloutBatch, _digest, read_batch, write_batch
from shakedown.rollout.reference import reference_logprobs, same_weights
from shakedown.rollout.store import RolloutStore
from shakedown.rollout.weights import EXPECTED, probe_tokens, read_expected
from shakedown.training.demo import write_model


def batch(step: int = 1, rows: int = 4, columns: int = 6) -> RolloutBatch:
    rng = np.random.default_rng(step)
    mask = np.zeros((rows, columns), dtype=np.bool_)
    mask[:, 3:] = True
    return RolloutBatch(
        step=step,
        versions=np.full(rows, step - 1, dtype=np.int64),
        tokens=rng.integers(0, 32, (rows, columns), dtype=np.int64),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random((rows, columns)), 0).astype(np.float32),
        rewards=rng.random(rows).astype(np.float32),
        groups=np.repeat(np.arange(rows // 2), 2).astype(np.int64),
        stats={"seconds": 1.5},
    )


def weights(value: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(value * 1000)
        (folder / "config.json").write_text("{}")

    return write


def test_batch_survives_its_file(tmp_path: Path) -> None:
    written = batch()

    write_batch(written, tmp_path / "b.npz")
    found = read_batch(tmp_path / "b.npz")

    for field in dataclasses.fields(RolloutBatch):
        assert np.array_equal(getattr(found, field.name), getattr(written, field.name)), field.name


@pytest.mark.parametrize(
    "change",
    [
        {"rewards": np.zeros(3, dtype=np.float32)},
        {"tokens": np.zeros((4, 6), dtype=np.int32)},
        {"logprobs": np.full((4, 6), np.nan, dtype=np.float32)},
        {"stats": {"seconds": float("inf")}},
        {"tokens": np.zeros(6, dtype=np.int64)},
        {"token_versions": np.zeros((4, 5), dtype=np.int64)},
        {"token_versions": np.zeros((4, 6), dtype=np.int32)},
        {"token_versions": np.full((4, 6), 7, dtype=np.int64)},
    ],
)
def test_batch_that_does_not_fit_together_is_not_written(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="batch 1"):
        write_batch(dataclasses.replace(batch(), **change), tmp_path / "b.npz")

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text", "pickle"])
def test_damaged_batch_is_a_storage_error_and_runs_nothing(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "b.npz"
    write_batch(batch(), path)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    elif damage == "pickle":
        np.savez(path, tokens=np.array([print], dtype=object))
    else:
        path.write_bytes(b"" if damage == "empty" else b"no batch")

    with pytest.raises(StorageError, match=r"b\.npz"):
        read_batch(path)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the arrays of a batch's file and make its checksum right again."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files if name != "sha256"}
    change(arrays)
    arrays["sha256"] = np.frombuffer(_digest(arrays), dtype=np.uint8)
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.pop("rewards"),
        lambda arrays: arrays.update(more=np.zeros(3)),
        lambda arrays: arrays.update(step=np.array([1, 2])),
        lambda arrays: arrays.update(stats=np.frombuffer(b"[1]", dtype=np.uint8)),
        lambda arrays: arrays.update(stats=np.frombuffer(b'{"a": "b"}', dtype=np.uint8)),
        lambda arrays: arrays.update(tokens=arrays["tokens"].astype(np.float64)),
        lambda arrays: arrays.update(groups=np.array(["a"] * 4)),
        lambda arrays: arrays.update(token_versions=arrays["tokens"]),
    ],
    ids=["missing", "more", "two steps", "list", "text", "floats", "words", "versions"],
)
def test_batch_of_wrong_arrays_is_a_storage_error(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    path = tmp_path / "b.npz"
    write_batch(batch(), path)
    rewrite(path, change)

    with pytest.raises(StorageError, match=r"b\.npz cannot be used"):
        read_batch(path)


def test_batch_whose_header_claims_more_than_there_is_is_a_storage_error(tmp_path: Path) -> None:
    header = io.BytesIO()
    claim = {"descr": "<i8", "fortran_order": False, "shape": (1 << 50,)}
    np.lib.format.write_array_header_1_0(header, claim)  # type: ignore[no-untyped-call]
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("tokens.npy", header.getvalue())

    with pytest.raises(StorageError, match=r"b\.npz cannot be used"):
        read_batch(tmp_path / "b.npz")


def test_versions_of_tokens_survive_the_file_and_old_files_have_none(tmp_path: Path) -> None:
    old = batch()
    tokens = np.where(old.loss_mask, 3, -1).astype(np.int64)
    tokens[:, 3] = 0
    new = dataclasses.replace(old, token_versions=tokens)

    write_batch(old, tmp_path / "old.npz")
    write_batch(new, tmp_path / "new.npz")
    found = read_batch(tmp_path / "new.npz").token_versions

    assert read_batch(tmp_path / "old.npz").token_versions is None
    assert found is not None
    assert found.tolist() == tokens.tolist()


def test_batch_with_another_batchs_array_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "b.npz"
    write_batch(batch(), path)
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez(path, **{**arrays, "rewards": arrays["rewards"] + 1})

    with pytest.raises(StorageError, match="checksum"):
        read_batch(path)


def test_waiting_trainer_gets_the_batch_when_it_comes(tmp_path: Path) -> None:
    exchange, looks = RolloutStore(tmp_path), []
    later = threading.Timer(0.2, lambda: exchange.publish_batch(batch(3)))
    later.start()

    found = RolloutStore(tmp_path).wait_batch(3, timeout=30.0, on_wait=lambda: looks.append(1))

    later.join()
    assert found.step == 3
    assert looks


def test_batch_that_never_comes_ends_the_wait_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(CannotJudgeError, match="no rollout batch for step 2 within 0 s"):
        RolloutStore(tmp_path).wait_batch(2, timeout=0.1)


def test_wait_can_be_left_from_its_own_callback(tmp_path: Path) -> None:
    def leave() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RolloutStore(tmp_path).wait_batch(1, timeout=30.0, on_wait=leave)


def test_used_batches_are_removed_and_others_kept(tmp_path: Path) -> None:
    exchange = RolloutStore(tmp_path)
    for step in (1, 2, 3):
        exchange.publish_batch(batch(step))
    exchange.publish_weights(2, weights(b"2"))

    exchange.publish_batch(batch(4))

    assert sorted(p.name for p in (tmp_path / "batches").iterdir()) == [
        "step_000003.npz",
        "step_000004.npz",
    ]


def test_nothing_is_published_at_first(tmp_path: Path) -> None:
    exchange = RolloutStore(tmp_path)

    assert exchange.latest_weights() is None
    assert exchange.latest_version() == 0
    assert not exchange.trainer_finished()


def test_newest_weights_are_found_with_a_digest_of_their_content(tmp_path: Path) -> None:
    exchange = RolloutStore(tmp_path)
    exchange.publish_weights(1, weights(b"a"))
    first = exchange.latest_weights()
    exchange.publish_weights(2, weights(b"b"))
    second = exchange.latest_weights()
    exchange.publish_weights(3, weights(b"b"))
    third = exchange.latest_weights()

    assert first is not None
    assert second is not None
    assert third is not None
    assert (second.version, third.version) == (2, 3)
    assert first.digest != second.digest == third.digest
    assert (third.folder / "model.safetensors").read_bytes() == b"b" * 1000


def test_loaded_weights_and_newer_ones_are_kept(tmp_path: Path) -> None:
    exchange = RolloutStore(tmp_path)
    for version in (1, 2, 3):
        exchange.publish_weights(version, weights(b"x"))
    assert len(list((tmp_path / "weights").glob("v*"))) == 3, "one of them may be being loaded"

    exchange.mark_loaded(3)
    exchange.publish_weights(4, weights(b"y"))

    assert sorted(p.name for p in (tmp_path / "weights").glob("v*")) == ["v000003", "v000004"]


def test_failed_write_publishes_nothing(tmp_path: Path) -> None:
    exchange = RolloutStore(tmp_path)
    exchange.publish_weights(1, weights(b"a"))

    def fail(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left on device"):
        exchange.publish_weights(2, fail)

    assert exchange.latest_version() == 1
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["latest.json", "v000001"]


def test_damaged_weights_are_never_handed_out(tmp_path: Path) -> None:
    exchange = RolloutStore(tmp_path)
    exchange.publish_weights(1, weights(b"a"))
    path = tmp_path / "weights" / "v000001" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(StorageError, match="damaged"):
        exchange.latest_weights()


def test_a_flipped_bit_amid_large_weights_is_noticed(tmp_path: Path) -> None:
    exchange = RolloutStore(tmp_path)
    exchange.publish_weights(1, weights(b"a" * 9_000))
    path = tmp_path / "weights" / "v000001" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    with pytest.raises(StorageError, match="safetensors has changed since it was written"):
        exchange.latest_weights()


def test_publisher_killed_in_the_middle_leaves_the_old_version(tmp_path: Path) -> None:
    exchange = RolloutStore(tmp_path)
    exchange.publish_weights(1, weights(b"a"))
    script = (
        "import sys, time; from pathlib import Path\n"
        "from shakedown.rollout.store import RolloutStore\n"
        "def write(folder):\n"
        "    (folder / 'model.safetensors').write_bytes(b'half'); print('half', flush=True)\n"
        "    time.sleep(3600)\n"
        "RolloutStore(Path(sys.argv[1])).publish_weights(2, write)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.communicate()

    found = exchange.latest_weights()
    assert found is not None
    assert found.version == 1
    exchange.publish_weights(2, weights(b"b"))
    assert exchange.latest_version() == 2


def test_damaged_note_is_a_storage_error(tmp_path: Path) -> None:
    exchange = RolloutStore(tmp_path)
    exchange.mark_loaded(1)
    (tmp_path / "loaded.json").write_text('{"ver')

    with pytest.raises(StorageError, match=r"loaded\.json"):
        exchange.loaded_version()


def test_end_of_the_trainer_is_seen_by_the_other_side(tmp_path: Path) -> None:
    RolloutStore(tmp_path).finish_trainer()

    assert RolloutStore(tmp_path).trainer_finished()


def test_readers_never_see_half_a_version(tmp_path: Path) -> None:
    exchange, enough = RolloutStore(tmp_path), threading.Event()

    def publish() -> None:
        for version in itertools.count(1):
            exchange.publish_weights(version, weights(bytes([65 + version % 26])))
            if enough.is_set():
                return

    writer = threading.Thread(target=publish)
    writer.start()
    try:
        seen: list[int] = []
        while len(set(seen)) < 10:
            assert writer.is_alive()
            found = RolloutStore(tmp_path).latest_weights()
            if found is not None:
                seen.append(found.version)
                exchange.mark_loaded(found.version)
    finally:
        enough.set()
        writer.join()
    assert seen == sorted(seen)


def save(folder: Path, **values: float) -> Path:
    folder.mkdir()
    tensors = {name: torch.full((2, 2), value) for name, value in values.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_weights_are_compared_by_content_and_not_by_file(tmp_path: Path) -> None:
    model = save(tmp_path / "a", embed=1.0, head=1.0)
    tied = save(tmp_path / "b", embed=1.0)
    changed = save(tmp_path / "c", embed=1.0, head=1.0 + 1e-6)
    foreign = save(tmp_path / "d", other=1.0)

    assert same_weights(model, tied)
    assert not same_weights(model, changed)
    assert not same_weights(model, foreign)


def test_model_too_large_for_a_reference_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shakedown.rollout.reference.LARGEST", 10)

    assert reference_logprobs(save(tmp_path / "a", embed=1.0), [1, 2]) is None


def test_references_for_several_servers_at_once_read_tied_weights(tmp_path: Path) -> None:
    """In threads transformers misses them: in 5 of 6 such rounds, where nobody waited."""
    write_model(tmp_path / "model", seed=0)

    def ask(_: int) -> list[float] | None:
        return reference_logprobs(tmp_path / "model", [5, 6, 7])

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(12)))

    assert found == [found[0]] * 12


def test_probe_is_as_long_as_the_server_takes() -> None:
    assert probe_tokens([[1, 2], [3]], longest=7) == [1, 2, 3, 1, 2, 3, 1]
    assert len(probe_tokens([[1, 2]], longest=10_000)) == 320


@pytest.mark.parametrize("text", ["{", "{}", '{"tokens": [1, 2], "logprobs": [-1, -2]}'])
def test_damaged_probe_of_the_trainer_is_a_storage_error(tmp_path: Path, text: str) -> None:
    (tmp_path / EXPECTED).write_text(text)

    with pytest.raises(StorageError, match=EXPECTED):
        read_expected(tmp_path)


def test_probe_of_the_trainer_is_read(tmp_path: Path) -> None:
    (tmp_path / EXPECTED).write_text(json.dumps({"tokens": [1, 2], "logprobs": [-0.5]}))

    found = read_expected(tmp_path)

    assert found is not None
    assert (found.tokens, found.logprobs) == ([1, 2], [-0.5])
    assert read_expected(tmp_path / os.devnull) is None
