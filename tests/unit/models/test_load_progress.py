"""A long load beats for every tensor, and ranks hear of another one's failure."""

import threading
from pathlib import Path

import pytest
import torch

from shakedown.config import OptimizerConfig
from shakedown.core.errors import StorageError
from shakedown.models import huggingface
from shakedown.models.huggingface import beating, loaded
from shakedown.training.coordination import PeerFailedError, Ranks
from shakedown.training.demo import write_model
from shakedown.training.engines import sharded_load
from shakedown.training.engines.fsdp import FsdpEngine
from shakedown.training.stage import worker
from tests.megatron_ranks import save_now
from tests.tiny_models import group_of_one

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, seed=0)
    return folder


def test_the_shards_of_a_model_beat_one_by_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)  # one reads it as a whole
    empty = sharded_load.open_model(model, huggingface.read_config(model))
    monkeypatch.undo()
    parameters = dict(empty.named_parameters())
    beats: list[None] = []

    with group_of_one(tmp_path), beating(lambda: beats.append(None)):
        sharded_load.fill(empty, parameters, model, CPU)

    assert len(beats) == len(parameters) > 10


def test_a_checkpoint_beats_for_weights_and_moments(model: Path, tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        settings = OptimizerConfig(lr=0.01)
        engine = FsdpEngine.build(model, optimizer=settings, dtype="float32", device=CPU)
        save_now(engine, tmp_path / "saved")
        beats: list[None] = []

        with beating(lambda: beats.append(None)):
            engine.load(tmp_path / "saved", updates=0)

    assert len(beats) >= 3 * len(list(engine._model.parameters()))


def test_beats_end_with_the_load(tmp_path: Path) -> None:
    beats: list[None] = []

    def load() -> None:
        with beating(lambda: beats.append(None)):
            loaded()
            (tmp_path / "missing").unlink()

    with pytest.raises(FileNotFoundError):
        load()
    loaded()

    assert len(beats) == 1


def ranks_of_one() -> tuple[Ranks, torch.distributed.Store]:
    store = torch.distributed.distributed_c10d._get_default_store()
    return Ranks(store, device=CPU, key=b"key"), torch.distributed.PrefixStore("shakedown", store)


def test_a_failure_is_raised_on_its_own_rank_after_the_sum(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        ranks, _ = ranks_of_one()

        assert ranks.all_reduce_or_raise({"loss": 2.0}, None) == {"loss": 2.0}
        with pytest.raises(StorageError, match="no space"):
            ranks.all_reduce_or_raise({"loss": 2.0}, StorageError("no space"))
        assert ranks.all_reduce_or_raise({}, None) == {}


def test_a_rank_that_hears_of_a_failure_repeats_its_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with group_of_one(tmp_path):
        ranks, store = ranks_of_one()
        monkeypatch.setattr(ranks, "sum", lambda values: dict.fromkeys(values, 1.0))
        monkeypatch.setattr(ranks, "rank", 1)
        ranks._write("1-failure", "rank 0 failed: StorageError: no space")

        with pytest.raises(PeerFailedError, match=r"^rank 0 failed: StorageError: no space$"):
            ranks.all_reduce_or_raise({"loss": 2.0}, None)

        assert store.get("1-failure-heard") == b"1"


def test_the_rank_that_holds_the_store_fails_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = []

    def load(ranks: Ranks) -> None:
        with pytest.raises(FileNotFoundError), ranks.failing_last("load"):
            (tmp_path / "missing").unlink()
        failed.append(ranks.rank)

    with group_of_one(tmp_path):
        first, last = ranks_of_one()[0], ranks_of_one()[0]
        for rank, ranks in enumerate((first, last)):
            monkeypatch.setattr(ranks, "rank", rank)
            monkeypatch.setattr(ranks, "world_size", 2)
        thread = threading.Thread(target=load, args=(first,))
        thread.start()
        thread.join(0.3)
        load(last)
        thread.join()

    assert failed == [1, 0]


def test_a_rank_that_heard_of_a_failure_leaves_a_sentence_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_job: object) -> int:
        raise PeerFailedError("rank 0 failed: StorageError: no space")

    monkeypatch.setattr(worker, "read_job", lambda path: path)
    monkeypatch.setattr(worker, "run", fail)

    code = worker.main(["--job", str(tmp_path)])

    assert code == 3
    assert capsys.readouterr().err == "shakedown: rank 0 failed: StorageError: no space\n"
