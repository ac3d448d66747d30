"""Checkpoints that a stranger wrote or named: no code of theirs runs, no other folder is read."""

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from shakedown.config import OptimizerConfig
from shakedown.core.errors import StorageError
from shakedown.training.checkpoint.checkpoints import Checkpoints, find
from shakedown.training.coordination import Ranks
from shakedown.training.demo import write_model
from shakedown.training.engines.dcp_pickle import read_records
from shakedown.training.engines.dcp_store import read_state
from shakedown.training.engines.fsdp import FsdpEngine
from tests.tiny_models import group_of_one

STATE = {"weight": torch.arange(6.0), "moments": {"lr": 0.1, "betas": (0.9, 0.99), "step": None}}


class Calls:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self._command = f"touch {mark}"

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    with group_of_one(tmp_path):
        yield


@pytest.fixture
def saved(tmp_path: Path, alone: None) -> Path:
    dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(tmp_path / "saved"))
    return tmp_path / "saved"


def empty() -> dict[str, Any]:
    return {"weight": torch.zeros(6), "moments": {"lr": 0.0, "betas": (), "step": 1}}


def metadata_of(folder: Path) -> Metadata:
    found: Metadata = read_records(folder / ".metadata")
    return found


def test_what_torch_saves_is_read_whole(saved: Path) -> None:
    state = empty()

    read_state(state, saved)

    assert torch.equal(state["weight"], torch.arange(6.0))
    assert state["moments"] == STATE["moments"]
    again = metadata_of(saved)
    written = pickle.loads((saved / ".metadata").read_bytes())  # noqa: S301 - our own
    assert repr(again) == repr(written)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_records_that_any_torch_2_wrote_are_read(
    saved: Path, tmp_path: Path, protocol: int
) -> None:
    """Early releases kept a tensor's properties in a class of another module."""
    metadata = metadata_of(saved)
    properties = sharded.TensorProperties(torch.bfloat16)
    metadata.state_dict_metadata["weight"].properties = properties
    (tmp_path / "older").write_bytes(pickle.dumps(metadata, max(protocol, 2)))

    found = read_records(tmp_path / "older")

    assert found.state_dict_metadata["weight"].properties == properties


def with_evil_global(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Calls(mark)))


def with_evil_part(folder: Path, mark: Path) -> None:
    metadata = metadata_of(folder)
    metadata.planner_data = Calls(mark)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def with_dotted_name(folder: Path, mark: Path) -> None:
    """From a class that is allowed, Python's unpickler walks on to what its module imported."""
    module = "torch.distributed.checkpoint.metadata"
    name = "Metadata.__init__.__globals__"
    both = b"".join(b"\x8c%c%s" % (len(text), text.encode()) for text in (module, name))
    (folder / ".metadata").write_bytes(b"\x80\x04" + both + b"\x93.")


def with_evil_value(folder: Path, mark: Path) -> None:
    """A tensor's place in the files that says: this is no tensor, unpickle it."""
    shutil.rmtree(folder)
    dcp.save({"weight": Calls(mark)}, storage_writer=dcp.FileSystemWriter(folder))
    metadata = metadata_of(folder)
    assert isinstance(metadata.state_dict_metadata["weight"], BytesStorageMetadata)


@pytest.mark.parametrize(
    ("poison", "sentence"),
    [
        (with_evil_global, r"asks for 'posix\.system', which no checkpoint holds"),
        (with_evil_part, r"asks for 'posix\.system'"),
        (with_dotted_name, r"asks for '.*__globals__'"),
        (with_evil_value, r"weight is more than a plain value"),
    ],
)
def test_code_in_a_checkpoint_does_not_run_and_is_named(
    saved: Path, tmp_path: Path, poison: Callable[[Path, Path], None], sentence: str
) -> None:
    mark = tmp_path / "mark"
    poison(saved, mark)

    with pytest.raises(StorageError, match=sentence) as raised:
        read_state({"weight": torch.zeros(6)}, saved)

    assert str(saved) in str(raised.value)
    assert "remove that checkpoint" in raised.value.hint
    assert not mark.exists()


@pytest.mark.parametrize("place", ["../__0_0.distcp", "/etc/passwd", "a/b"])
def test_tensors_are_read_out_of_the_checkpoints_own_folder_alone(
    saved: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "__0_0.distcp").write_bytes((saved / "__0_0.distcp").read_bytes())
    metadata = metadata_of(saved)
    for each in metadata.storage_data.values():
        each.relative_path = place
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))

    with pytest.raises(StorageError, match="is not in"):
        read_state(empty(), saved)


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\x80\x04.", b"\x80\x04Nb.", b"\x80\x04N.", b"\x80\x04}."]
)
def test_damaged_metadata_is_told_as_damaged(saved: Path, data: bytes) -> None:
    (saved / ".metadata").write_bytes(data)

    with pytest.raises(StorageError, match="cannot read checkpoint"):
        read_state(empty(), saved)


def test_what_a_rank_says_of_its_files_runs_no_code(tmp_path: Path, alone: None) -> None:
    """Another user's file in its place, between a rank's writing and rank 0's reading."""
    write_model(tmp_path / "model", seed=0)
    settings = OptimizerConfig(lr=0.01)
    engine = FsdpEngine.build(
        tmp_path / "model", optimizer=settings, dtype="float32", device=torch.device("cpu")
    )
    snapshot = engine.snapshot()
    snapshot.write(tmp_path / "staged")
    (tmp_path / "staged" / "results-rank0").write_bytes(pickle.dumps([Calls(tmp_path / "mark")]))

    with pytest.raises(StorageError, match=r"results-rank0: it asks for 'posix\.system'"):
        snapshot.complete(tmp_path / "staged")

    assert not (tmp_path / "mark").exists()


# --- the name of the checkpoint to go on from


class Follower(Ranks):
    """A rank that is told `chosen` by rank 0."""

    def __init__(self, chosen: str) -> None:
        self.rank, self.world_size, self._chosen = 1, 2, chosen

    def broadcast_from_rank0(self, *_args: Any, **_options: Any) -> str:
        return self._chosen


class Engine:
    """Tells what it was given to load."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Path, int]] = []

    def load(self, folder: Path, *, updates: int) -> None:
        self.loaded.append((folder, updates))


def resume(root: Path, chosen: str, engine: Engine) -> int:
    stage: Any = engine
    return Checkpoints(root, engine=stage, ranks=Follower(chosen), fingerprint={}, keep=2).resume()


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A stage's checkpoints, and beside them a whole one that is not the stage's."""
    root = tmp_path / "stage" / "checkpoints"
    for folder in (root / "step_000004", tmp_path / "evil" / "step_000009"):
        (folder / "engine").mkdir(parents=True)
        body = '{"step": %d, "updates": 1, "world_size": 3, "fingerprint": {}, "files": {}}'
        (folder / "meta.json").write_text(body % int(folder.name[-1]))
    return root


def test_a_rank_goes_on_from_a_checkpoint_of_its_stage(stage: Path) -> None:
    engine = Engine()

    assert resume(stage, "step_000004", engine) == 4
    assert engine.loaded == [(stage / "step_000004" / "engine", 1)]


@pytest.mark.parametrize(
    "chosen",
    [
        "../../evil/step_000009",
        "{evil}",
        "step_000004/../../../evil/step_000009",
        "..",
        ".",
        "step_000009",
        "step_000004\n",
        "step_٤",
        "latest",
        "linked-step_000009",
        "step_000008",
    ],
)
def test_a_rank_goes_on_from_nothing_else(stage: Path, chosen: str) -> None:
    evil = stage.parents[1] / "evil" / "step_000009"
    (stage / "linked-step_000009").symlink_to(evil)
    (stage / "step_000008").symlink_to(evil)
    engine = Engine()

    with pytest.raises(StorageError, match=r"^(cannot resume from|checkpoint .* rank 1 sees it)"):
        resume(stage, chosen.format(evil=evil), engine)

    assert not engine.loaded


def test_a_link_in_place_of_a_checkpoint_is_not_chosen_and_told(stage: Path) -> None:
    (stage / "step_000009").symlink_to(stage.parents[1] / "evil" / "step_000009")

    found = find(stage, {})

    assert found.folder == stage / "step_000004"
    assert "step_000009 ignored: a link" in found.messages[0]
