"""Rows of metrics.jsonl without what a clock or the machine's memory says."""

from collections.abc import Mapping, Sequence
from typing import Any

_MEASURED = ("_seconds", "_per_second", "memory_gb", "memory_max_gb", "idle_share")


def without_measured(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What two runs of the same training must have in common."""
    return [{k: v for k, v in row.items() if not k.endswith(_MEASURED)} for row in rows]
