"""Injected faults: found by name, struck once at their rank and step."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from shakedown.config import FaultConfig, StageConfig
from shakedown.core.errors import ConfigError
from shakedown.training import fault_acts, faults
from shakedown.training.batch import TokenBatch, pad_rows
from shakedown.training.engines import engine_class
from shakedown.training.faults import (
    KINDS,
    FaultPlace,
    InjectedFault,
    Injector,
    Strike,
    SwallowedError,
    check_kind,
)

ROOT = Path(__file__).parents[3]


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'busy_rank'"):
        check_kind("busy_rnak")


def test_an_unknown_kind_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="unknown fault kind"):
        Injector(FaultConfig(kind="meteor"), rank=0)


def test_every_kind_says_what_it_does_and_strikes_somewhere() -> None:
    assert all(fault.what and fault.place in get_args(FaultPlace) for fault in KINDS.values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_stands_in_the_table_of_the_docs(kind: str) -> None:
    table = (
        (ROOT / "docs" / "training.md")
        .read_text(encoding="utf-8")
        .partition("## Fault injection")[2]
    )

    assert f"`{kind}`" in table


@pytest.mark.parametrize(
    ("rank", "place", "step"), [(0, "step", 3), (1, "data", 3), (1, "step", 2), (1, "step", 4)]
)
def test_elsewhere_nothing_happens(
    rank: int, place: FaultPlace, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = FaultConfig(kind="exception_in_cleanup", rank=1, step=3)

    Injector(config, rank=rank).at(place, step)

    assert capsys.readouterr().out == ""


def test_at_its_rank_step_and_place_it_strikes(capsys: pytest.CaptureFixture[str]) -> None:
    config = FaultConfig(kind="exception_in_cleanup", rank=1, step=3)

    with pytest.raises(SwallowedError):
        Injector(config, rank=1).at("step", 3)

    assert capsys.readouterr().out == "injected fault: exception_in_cleanup on rank 1 at step 3\n"


@pytest.mark.parametrize("place", get_args(FaultPlace))
def test_no_fault_is_configured_by_default(
    place: FaultPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    default = StageConfig.model_fields["fault"].get_default()

    Injector(default, rank=1).at(place, 3)

    assert (default, capsys.readouterr().out) == (None, "")


class Struck(list[Strike]):
    """A kind of its own that only notes that it struck."""

    def kind(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> FaultConfig:
        fault = replace(InjectedFault("step", "notes", self.append), **changes)
        monkeypatch.setitem(faults.KINDS, "noted", fault)
        return FaultConfig(kind="noted", rank=1, step=3)


def test_a_fault_of_all_ranks_tells_who_is_the_culprit(monkeypatch: pytest.MonkeyPatch) -> None:
    struck = Struck()
    config = struck.kind(monkeypatch, everywhere=True)

    for rank in range(3):
        Injector(config, rank).at("step", 3, rank)

    assert struck == [Strike(False, 0), Strike(True, 1), Strike(False, 2)]


@pytest.mark.parametrize(("repeated", "times"), [(False, 1), (True, 3)])
def test_a_repeated_fault_strikes_from_its_step_on(
    repeated: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = Struck()
    injector = Injector(struck.kind(monkeypatch, repeated=repeated), rank=1)

    for step in range(1, 6):
        injector.at("step", step)

    assert len(struck) == times


@pytest.mark.parametrize("place", sorted(faults.START))
def test_a_fault_of_the_start_needs_no_step(
    place: FaultPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = Struck()

    Injector(struck.kind(monkeypatch, place=place), rank=1).at(place)

    assert len(struck) == 1


def test_the_orchestrators_faults_spare_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    struck = Struck()
    config = struck.kind(monkeypatch, place="rollout", role="orchestrator")

    Injector(config, rank=1).at("rollout", 3)
    assert not struck
    Injector(config, rank=0, role="orchestrator").at("rollout", 3)

    assert len(struck) == 1


class Engine:
    """Keeps what it is given to train on."""

    def __init__(self) -> None:
        self.trained: list[TokenBatch] = []

    def forward_backward(self, batches: Sequence[TokenBatch], _loss: None) -> None:
        self.trained += batches


def _batches() -> list[TokenBatch]:
    whole = pad_rows([[1, 2, 3, 4], [5, 6]], [2, 1], pad=0)
    whole = replace(whole, extra={"share": torch.ones(2, 4), "advantages": torch.ones(2)})
    return [whole, whole]


def test_the_rank_with_a_wrong_shape_trains_on_a_column_less() -> None:
    engine = Engine()

    fault_acts.wrong_shape(Strike(subject=SimpleNamespace(engine=engine)))
    engine.forward_backward(_batches(), None)

    assert [tuple(b.tokens.shape) for b in engine.trained] == [(2, 3), (2, 3)]
    first = engine.trained[0]
    assert (first.lengths.tolist(), tuple(first.mask.shape)) == ([3, 2], (2, 3))
    assert [tuple(v.shape) for v in first.extra.values()] == [(2, 3), (2,)]


def test_the_rank_that_is_short_of_data_trains_on_a_micro_batch_less() -> None:
    engine = Engine()

    fault_acts.fewer_micro_batches(Strike(subject=SimpleNamespace(engine=engine)))
    engine.forward_backward(_batches(), None)

    assert len(engine.trained) == 1


def test_the_sums_of_a_rank_with_another_size_hold_more_numbers() -> None:
    seen: list[Mapping[str, float]] = []
    ranks = SimpleNamespace(sum=seen.append)

    fault_acts.size_mismatch(Strike(subject=SimpleNamespace(ranks=ranks)))
    ranks.sum({"loss": 1.0})

    assert len(seen[0]) == 1001


def test_an_fsync_that_stalls_holds_only_the_thread_that_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fsync", os.fsync)  # put back afterwards
    fault_acts.storage_stall(Strike())

    thread = threading.Thread(target=os.fsync, args=(0,), daemon=True)
    thread.start()
    thread.join(0.2)

    assert thread.is_alive()


@pytest.mark.parametrize(
    "module",
    ["shakedown.training.faults", "shakedown.training.engines", "shakedown.training.assets"],
)
def test_names_are_known_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'datasets')))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_allocation_names_its_engine() -> None:
    assert engine_class("fsdp:d2").__name__ == "FsdpEngine"


@pytest.mark.parametrize(
    ("allocation", "message"),
    [
        ("vllm:d2", "no training engine 'vllm'"),
        ("fsdp:d2c2", r"cannot split over c.*\n.*fsdp:d4"),
        ("megatron:d2c2", r"cannot split over c; it has d, p, t"),
        ("megatron:(attn:d2|ffn:e2)", r"dense models, without experts"),
        ("fsdp:d2+vllm:d1", r"one training engine, and here are 2 parts\n.*serve.allocation"),
        ("fsdp[a]:d2|fsdp[b]:d2", r"one training engine"),
    ],
)
def test_an_allocation_that_no_engine_can_do_is_refused(allocation: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_class(allocation)
