"""Faults for drills: found by name, struck once at their rank and step."""

import subprocess
import sys
from typing import get_args

import pytest

from shakedown.config import FaultConfig, StageConfig
from shakedown.errors import ConfigError
from shakedown.training.engines import engine_class
from shakedown.training.faults import KINDS, Injector, Place, SwallowedError, check_kind


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'busy_rank'"):
        check_kind("busy_rnak")


def test_an_unknown_kind_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="unknown fault kind"):
        Injector(FaultConfig(kind="meteor"), rank=0)


def test_every_kind_says_what_it_does_and_strikes_somewhere() -> None:
    assert all(
        fault.what and fault.place in ("step", "data", "metrics") for fault in KINDS.values()
    )


@pytest.mark.parametrize(
    ("rank", "place", "step"), [(0, "step", 3), (1, "data", 3), (1, "step", 2), (1, "step", 4)]
)
def test_elsewhere_nothing_happens(
    rank: int, place: Place, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = FaultConfig(kind="exception_in_cleanup", rank=1, step=3)

    Injector(config, rank=rank).at(place, step)

    assert capsys.readouterr().out == ""


def test_at_its_rank_step_and_place_it_strikes(capsys: pytest.CaptureFixture[str]) -> None:
    config = FaultConfig(kind="exception_in_cleanup", rank=1, step=3)

    with pytest.raises(SwallowedError):
        Injector(config, rank=1).at("step", 3)

    assert capsys.readouterr().out == "drill: exception_in_cleanup on rank 1 at step 3\n"


@pytest.mark.parametrize("place", get_args(Place))
def test_no_fault_is_configured_by_default(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    default = StageConfig.model_fields["fault"].get_default()

    Injector(default, rank=1).at(place, 3)

    assert (default, capsys.readouterr().out) == (None, "")


@pytest.mark.parametrize(
    "module",
    ["shakedown.training.faults", "shakedown.training.engines", "shakedown.commands.assets"],
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
