"""GPUs through a stand-in for NVML, torch's view of them, their rates, and XID errors."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shakedown.preflight import torch_view
from shakedown.preflight.check import CheckJudgement, Fleet
from shakedown.preflight.checks import gpus, torch_gpus, xid
from shakedown.preflight.datatypes import (
    CheckReport,
    DrillFault,
    Expectations,
    NodeFacts,
    NodeReport,
    ProbeRequest,
)
from shakedown.preflight.faults import FAULTS, with_faults
from tests.nvml_stub import GB, Card, install

WANT = Expectations(gpus=2, gpu_model="h100")
ASKED = ProbeRequest({"n1": "127.0.0.1"}, "out", "t", want=WANT)


def judged(
    monkeypatch: pytest.MonkeyPatch, *cards: Card, want: Expectations = WANT
) -> CheckJudgement:
    install(monkeypatch, cards)
    return gpus.judge(gpus.measure(ASKED, "n1"), want)


def test_two_good_cards_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, Card(), Card())

    assert (found.status, found.measured) == ("pass", "2 (nvml)")


@pytest.mark.parametrize(
    ("card", "status", "told"),
    [
        (Card(ecc=2), "fail", "2 uncorrected memory errors"),
        (Card(remapped=(0, 1, 1, 0)), "fail", "a row remapping is pending"),
        (Card(remapped=(0, 1, 0, 1)), "fail", "a row could not be remapped"),
        (Card(reasons=0x8), "fail", "slowed down: HwSlowdown"),
        (Card(reasons=0x80), "fail", "slowed down: HwPowerBrakeSlowdown"),
        (Card(reasons=0x20), "warn", "slowed down: SwThermalSlowdown"),
        (Card(pcie=(8, 16)), "fail", "PCIe x8 of x16"),
        (Card(links={**Card().links, 3: 0}), "fail", "1 NVLinks are down"),
        (Card(links=dict.fromkeys(range(17), 1)), "fail", "nvlinks 17, elsewhere 18"),
        (Card(total=79 * GB), "fail", "memory_mb"),
        (Card(used=40 * GB), "warn", "40960 MB in use"),
        (Card(processes=[1]), "warn", "in use by processes [1]"),
    ],
)
def test_what_is_wrong_with_a_card_is_named(
    monkeypatch: pytest.MonkeyPatch, card: Card, status: str, told: str
) -> None:
    found = judged(monkeypatch, Card(), Card(), card)

    assert found.status == status
    assert any(text.startswith("GPU 2") and told in text for text in found.measured)


@pytest.mark.parametrize("reasons", [0x1, 0x4, 0x2])
def test_idling_and_power_capping_are_normal(monkeypatch: pytest.MonkeyPatch, reasons: int) -> None:
    assert judged(monkeypatch, *[Card(reasons=reasons)] * 2).status == "pass"


def test_a_card_without_ecc_and_links_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, *[Card(ecc=None, links={})] * 2).status == "pass"


def test_a_lost_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, Card(), replace(Card(), lost=True))

    assert (found.status, found.measured) == ("fail", "lost: GPU 1: GPU is lost")


def test_another_model_than_the_config_names_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    want = replace(WANT, gpu_model="h200")

    found = judged(monkeypatch, Card(), Card(), want=want)

    assert (found.status, found.blame) == ("fail", "user")
    assert found.measured == ["NVIDIA H100 80GB HBM3"]


def test_cards_that_the_job_may_not_use_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [Card(), Card()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    found = gpus.judge(gpus.measure(ASKED, "n1"), WANT)

    assert (found.status, found.measured, found.blame) == ("fail", 1, "user")


def test_without_a_driver_what_slurm_promised_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [], driver=False)
    monkeypatch.setenv("SLURM_STEP_GPUS", "0,1")

    facts = gpus.measure(ASKED, "n1")

    assert (facts["source"], facts["count"]) == ("slurm (SLURM_STEP_GPUS)", 2)
    assert facts["unasked"] == "Driver Not Loaded"


TORCH = {"version": "2.13", "cuda": "13.0", "nccl": "2.29.7", "count": 2, "failed": ""}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"count": 0, "cuda": None, "version": "2.13+cpu"}, "torch 2.13+cpu is a CPU build"),
        ({"count": 0, "version": None}, "torch is not installed"),
        ({"count": 1}, 1),
        ({"failed": "CUDA error: no kernel image"}, "CUDA error: no kernel image"),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_fails(change: dict[str, Any], told: object) -> None:
    assert torch_gpus.judge(TORCH, WANT).status == "pass"
    assert torch_gpus.judge({**TORCH, **change}, WANT).measured == told


def test_the_torch_of_this_environment_is_asked() -> None:
    torch = pytest.importorskip("torch")

    facts = torch_gpus.measure(replace(ASKED, limit=120.0), "n1")

    assert facts["version"] == torch.__version__
    assert facts["count"] == torch.cuda.device_count()


def rates(**changes: float) -> dict[str, Any]:
    good = {"to_gpu_gb_s": 55.0, "to_host_gb_s": 55.0, "memory_gb_s": 3000.0, "gemm tflop_s": 700.0}
    return {"name": "NVIDIA H100 80GB HBM3", **good, **changes}


@pytest.mark.parametrize(
    ("odd", "status"),
    [
        ({}, "pass"),
        ({"to_gpu_gb_s": 25.0}, "fail"),
        ({"gemm tflop_s": 500.0}, "fail"),
    ],
)
def test_a_slow_gpu_of_a_node_is_found(odd: dict[str, float], status: str) -> None:
    facts = {"failed": "", "devices": [*[rates()] * 7, rates(**odd)]}

    assert torch_gpus.judge_speed(facts, WANT).status == status


def test_slow_memory_on_every_gpu_is_a_warning() -> None:
    facts = {"failed": "", "devices": [rates(memory_gb_s=1000.0)] * 8}

    assert torch_gpus.judge_speed(facts, WANT).status == "warn"


def test_no_gpu_to_measure_is_an_error_and_never_the_cpu() -> None:
    assert torch_gpus.judge_speed({"failed": "", "devices": []}, WANT).status == "error"


def fleet(check: str, facts: dict[str, NodeFacts]) -> Fleet:
    reports = {n: NodeReport(n, {check: CheckReport(f)}) for n, f in facts.items()}
    return Fleet(reports, WANT)


def test_a_slow_node_among_good_ones_is_found() -> None:
    rows: dict[str, NodeFacts] = {f"n{n}": {"devices": [rates()]} for n in range(7)}
    rows["n7"] = {"devices": [rates(memory_gb_s=2000.0)]}

    assert list(torch_gpus.compare_speed(fleet("gpu_speed", rows))) == ["n7"]


def test_another_driver_than_on_most_nodes_fails() -> None:
    rows: dict[str, NodeFacts] = {
        node: {"driver": "580", "cuda": "13.0", "gpus": [{"name": "H100"}]} for node in "abc"
    }
    rows["b"] = {**rows["b"], "driver": "570"}

    found = gpus.compare(fleet("gpus", rows))

    assert {node: one.status for node, one in found.items()} == {
        "a": "pass",
        "b": "fail",
        "c": "pass",
    }
    assert found["b"].measured == {"driver": "570, elsewhere 580"}


def test_the_models_own_products_are_measured(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"hidden_size": 1024, "intermediate_size": 3072}))

    assert torch_view.gemm_shapes(config) == [
        (4096, 1024, 1024),
        (4096, 1024, 3072),
        (4096, 3072, 1024),
    ]


LOG = """\
[   10.000001] NVRM: loading NVIDIA UNIX Open Kernel Module  580.65.06
[ 3600.500000] NVRM: Xid (PCI:0000:3b:00): {code}, pid=4242, name=python, {text}
"""


@pytest.mark.parametrize(
    ("code", "count", "hours", "status"),
    [
        (79, 1, 0.5, "fail"),
        (95, 1, 0.5, "fail"),
        (94, 1, 0.5, "warn"),
        (31, 1, 0.5, "warn"),
        (31, 5, 0.5, "fail"),
        (63, 1, 0.5, "pass"),
        (79, 1, 2.5, "pass"),
    ],
)
def test_xids_are_graded_by_code_number_and_age(
    code: int, count: int, hours: float, status: str
) -> None:
    text = LOG.format(code=code, text="GPU has fallen off the bus.") * count
    errors = xid.parse_xids(text, uptime=3600.5 + hours * 3600)

    assert errors[0] == [code, "PCI:0000:3b:00", hours, errors[0][3]]
    assert xid.judge({"errors": errors, "unreadable": ""}, WANT).status == status


def test_a_log_that_cannot_be_read_is_skipped_never_passed() -> None:
    facts = {"errors": [], "unreadable": "dmesg: read kernel buffer failed"}

    assert xid.judge(facts, WANT).status == "skip"


@pytest.mark.parametrize(("kind", "check"), [("cpu_torch", torch_gpus), ("xid", xid)])
def test_injected_gpu_faults_are_judged_as_real_ones(kind: str, check: Any) -> None:
    good = {"errors": [], "unreadable": ""} if check is xid else TORCH
    row = FAULTS[kind].check
    asked = replace(ASKED, faults=[DrillFault(kind)])

    changed = with_faults(row, lambda _request, _node: good)(asked, "n1")

    assert check.judge(good, WANT).status == "pass"
    assert check.judge(changed, WANT).status == "fail"


def test_rates_have_a_row_a_gpu_with_transfers_memory_and_products() -> None:
    """On the CPU, through the functions of torch that are asked for a GPU."""
    torch = pytest.importorskip("torch")

    def on_cpu(make: Any) -> Any:
        return lambda *size, dtype, **_place: make(*size, dtype=dtype)

    cuda = SimpleNamespace(
        synchronize=lambda _device: None, get_device_name=lambda number: f"card {number}"
    )
    shim = SimpleNamespace(
        cuda=cuda,
        device=lambda kind, number: f"{kind}:{number}",
        empty=on_cpu(torch.empty),
        randn=on_cpu(torch.randn),
        **{name: getattr(torch, name) for name in ("uint8", "bfloat16", "matmul")},
    )

    row = torch_view._speed(shim, 1, [(64, 32, 16)])

    assert row.pop("name") == "card 1"
    names = ["to_gpu_gb_s", "to_host_gb_s", "memory_gb_s", "gemm 64x32x16 tflop_s"]
    assert list(row) == names
    assert all(row[name] > 0 for name in names[:3])
