"""Clocks: a node far ahead or behind breaks leases, tokens and the order of logs."""

import time
from collections.abc import Mapping, Sequence

from shakedown.core.verdict import FindingStatus
from shakedown.preflight.check import Check, CheckJudgement, Fleet
from shakedown.preflight.datatypes import NodeFacts, ProbeRequest

MAX_SKEW_FAIL = 30.0  # seconds; munge and Kerberos give up at 300


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """`now`: seconds since the epoch."""
    return {"now": time.time()}


def compare(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """Seconds ahead of most others over the network, or at least as far as the reply's window
    proves."""
    most = fleet.want.max_clock_skew
    found = {}
    for node, facts in fleet.facts("clock").items():
        bound = _outside(facts["now"], fleet.reports[node].reply)
        # With two nodes the network cannot tell whose clock is wrong, but the window may.
        ahead = fleet.ahead.get(node, bound)
        status: FindingStatus = "pass" if abs(ahead) <= most else "warn"
        if abs(ahead) > MAX_SKEW_FAIL:
            status = "fail"
        remedy = "" if status == "pass" else "start chrony or ntpd on the node"
        expected = f"within {most:g}"
        found[node] = CheckJudgement(status, round(ahead, 3), expected, "s ahead", "node", remedy)
    return found


def _outside(now: float, window: Sequence[float]) -> float:
    """How far `now` is outside the window; 0 if inside, or without a window."""
    if len(window) != 2:
        return 0.0
    sent, got = window
    return max(0.0, now - got) + min(0.0, now - sent)


CLOCK = Check(
    "clock",
    "a node's clock differs from the others'",
    measure,
    compare=compare,
    limit="warns above 1 s, fails above 30 s",
    source="a tenth of the 300 s at which munge and Kerberos refuse",
)
