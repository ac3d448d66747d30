"""Collecting evidence from running processes before they are ended."""

from shakedown.monitor.collect.local import (
    CollectReport,
    TargetReport,
    collect_cluster,
    collect_local,
)
from shakedown.monitor.collect.targets import (
    Target,
    from_attempt,
    from_job,
    from_pattern,
    from_pids,
    from_processes,
    missing_ranks,
)

__all__ = [
    "CollectReport",
    "Target",
    "TargetReport",
    "collect_cluster",
    "collect_local",
    "from_attempt",
    "from_job",
    "from_pattern",
    "from_pids",
    "from_processes",
    "missing_ranks",
]
