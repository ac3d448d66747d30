"""A site's own numbers, recorded from good nodes, to compare later runs with.

Published limits conflict (an all-reduce over eight H100 should reach 460, 400 or 500 GB/s); a
site's measurements on trusted nodes say more.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from shakedown.core.errors import UsageError
from shakedown.core.files import read_object, write_json
from shakedown.core.verdict import FindingStatus
from shakedown.preflight.check import Check, CheckJudgement, Fleet
from shakedown.preflight.datatypes import Expectations, NodeReport

SCHEMA = "shakedown/preflight-baseline/1"
# Azure's limits for matrix products: a warning at -3.5 %, and a replacement at -7 %.
WARN_SHARE, FAIL_SHARE = 0.965, 0.93
BaselineValue = str | float


def record_baseline(path: Path, reports: Mapping[str, NodeReport]) -> None:
    """Write the nodes' usual values: the most common text, the median of a rate.

    Raises:
        StorageError: the file cannot be written.
    """
    fleet = Fleet(reports, Expectations())
    rows = [values_of(fleet, node) for node in reports]
    names = sorted({name for row in rows for name in row})
    values = {name: _usual([row[name] for row in rows if name in row]) for name in names}
    write_json(path, {"schema": SCHEMA, "nodes": len(rows), "values": values})


def read_baseline(path: Path) -> dict[str, BaselineValue]:
    """The values of a baseline.

    Raises:
        UsageError: no such file, or it is not a baseline.
    """
    hint = "shakedown preflight --tier standard --record-baseline FILE"
    values = read_object(path, "preflight baseline", schema=SCHEMA, hint=hint).get("values")
    if not isinstance(values, dict) or not all(
        isinstance(v, str | int | float) and not isinstance(v, bool) for v in values.values()
    ):
        raise UsageError(f"{path}: `values` must hold texts and numbers by name", hint=hint)
    return values


def _usual(values: list[BaselineValue]) -> BaselineValue:
    numbers = [value for value in values if not isinstance(value, str)]
    return round(median(numbers), 1) if numbers else Counter(values).most_common(1)[0][0]


def values_of(fleet: Fleet, node: str) -> dict[str, BaselineValue]:
    """One node's values for a baseline: texts must be equal, numbers are rates."""
    machine, memory, gpus, torch, speed = (
        fleet.facts(check).get(node, {})
        for check in ("machine", "memory", "gpus", "torch_gpus", "gpu_speed")
    )
    cards = gpus.get("gpus", [])
    texts = {
        "kernel": machine.get("kernel"),
        "libc": machine.get("libc"),
        "cpus": machine.get("cpus"),
        # Rounded, as the firmware uses some MB more or less at each boot.
        "memory_gib": memory and round(memory["total_mb"] / 1024),
        "driver": gpus.get("driver"),
        "gpus": cards and f"{len(cards)} x {', '.join(sorted({card['name'] for card in cards}))}",
        "torch": torch.get("version"),
        "torch's CUDA": torch.get("cuda"),
        "NCCL": torch.get("nccl"),
    }
    found: dict[str, BaselineValue] = {name: str(text) for name, text in texts.items() if text}
    rows = speed.get("devices", [])
    for rate in [key for key in (rows[0] if rows else {}) if key != "name"]:
        found[rate] = min(float(row[rate]) for row in rows)
    return found


def compare(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """Compare every node with the baseline, where both have a value."""
    return {node: _judged(values_of(fleet, node), fleet.want.baseline) for node in fleet.reports}


def _judged(
    here: Mapping[str, BaselineValue], baseline: Mapping[str, BaselineValue]
) -> CheckJudgement:
    shares = {
        name: float(value) / float(baseline[name])
        for name, value in here.items()
        if not isinstance(value, str) and baseline.get(name)
    }
    slow = {name: share for name, share in shares.items() if share < WARN_SHARE}
    other = {
        name: f"{value}, in the baseline {baseline[name]}"
        for name, value in here.items()
        if isinstance(value, str) and name in baseline and value != baseline[name]
    }
    told = {
        **{
            n: f"{here[n]}, {share:.1%} of the baseline's {baseline[n]}"
            for n, share in slow.items()
        },
        **other,
    }
    status: FindingStatus = "warn" if told else "pass"
    if any(share < FAIL_SHARE for share in slow.values()):
        status = "fail"
    remedy = "check clocks, temperature and power; after an upgrade record the baseline again"
    measured = told or f"{len(here.keys() & baseline.keys())} values as recorded"
    return CheckJudgement(status, measured, _EXPECTED, "", "node", remedy if told else "")


_EXPECTED = f"rates >= {WARN_SHARE:.1%} of the baseline, everything else equal"

BASELINE = Check(
    "baseline",
    "a rate of `gpu_speed` is far below the site's baseline; warns: a rate is below it, or kernel, "
    "CPUs, memory, GPUs, driver, torch, CUDA or NCCL differ",
    compare=compare,
    needs="baseline",
    limit="warns below 96.5 %, fails below 93 %",
    source="Azure's limits for matrix products",
)
