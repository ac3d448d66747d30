"""A stand-in for nvidia-ml-py's `pynvml`: its functions and constants, over cards of one's own.

There is no GPU where the tests run. Names, arguments, values and errors are those of nvidia-ml-py
13.615 and NVML's documentation.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

GB = 2**30


class NVMLError(Exception):
    """As pynvml's: `value` is NVML's return code."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        return {3: "Not Supported", 9: "Driver Not Loaded", 15: "GPU is lost"}[self.value]


@dataclass(frozen=True)
class Card:
    """One GPU. `links`: state by number of link; the others are not supported."""

    name: str = "NVIDIA H100 80GB HBM3"
    total: int = 80 * GB
    used: int = GB
    processes: Sequence[int] = ()
    ecc: int | None = 0
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    reasons: int = 0
    pcie: tuple[int, int] = (16, 16)
    links: Mapping[int, int] = field(default_factory=lambda: dict.fromkeys(range(18), 1))
    lost: bool = False


def install(monkeypatch: pytest.MonkeyPatch, cards: Sequence[Card], *, driver: bool = True) -> None:
    """`import pynvml` gives the stand-in."""
    monkeypatch.setitem(sys.modules, "pynvml", _module(cards, driver=driver))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def _module(cards: Sequence[Card], *, driver: bool) -> ModuleType:
    def begin() -> None:
        if not driver:
            raise NVMLError(9)

    def handle(index: int) -> Card:
        if cards[index].lost:
            raise NVMLError(15)
        return cards[index]

    def or_unsupported(value: Any) -> Any:
        if value is None:
            raise NVMLError(3)
        return value

    module = ModuleType("pynvml")
    vars(module).update(
        NVMLError=NVMLError,
        NVML_ERROR_NOT_SUPPORTED=3,
        NVML_ERROR_NO_PERMISSION=4,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        NVML_NVLINK_MAX_LINKS=36,
        nvmlClocksEventReasonHwSlowdown=0x8,
        nvmlClocksEventReasonSwThermalSlowdown=0x20,
        nvmlClocksEventReasonHwThermalSlowdown=0x40,
        nvmlClocksEventReasonHwPowerBrakeSlowdown=0x80,
        nvmlInit=begin,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13000,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetName=lambda card: card.name,
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(total=card.total, used=card.used),
        nvmlDeviceGetTotalEccErrors=lambda card, _kind, _counter: or_unsupported(card.ecc),
        nvmlDeviceGetRemappedRows=lambda card: card.remapped,
        nvmlDeviceGetCurrentClocksEventReasons=lambda card: card.reasons,
        nvmlDeviceGetCurrPcieLinkWidth=lambda card: card.pcie[0],
        nvmlDeviceGetMaxPcieLinkWidth=lambda card: card.pcie[1],
        nvmlDeviceGetNvLinkState=lambda card, link: or_unsupported(card.links.get(link)),
        nvmlDeviceGetComputeRunningProcesses=lambda card: [
            SimpleNamespace(pid=pid) for pid in card.processes
        ],
    )
    return module
