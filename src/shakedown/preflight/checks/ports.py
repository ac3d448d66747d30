"""Ports that the run will listen on."""

import socket

from shakedown.preflight.check import Check, CheckJudgement
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """`taken`: requested ports that cannot be bound on all interfaces, with the reason."""
    requested = {str(port): _bind_fault(port) for port in request.ports}
    taken = {port: why for port, why in requested.items() if why}
    return {"asked": list(request.ports), "taken": taken}


def _bind_fault(port: int) -> str | None:
    """Why the port cannot be bound on all interfaces; None if it can."""
    try:
        # This sets SO_REUSEADDR: a port counts as free while its last connection is still closing.
        with socket.create_server(("", port)):
            return None
    # OverflowError: a port above 65535.
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:  # noqa: ARG001
    """The requested ports must be free."""
    if not facts["asked"]:
        return CheckJudgement("skip", expected="no ports were given", blame="none")
    if facts["taken"]:
        remedy = "stop the process that listens there (ss -ltnp), or choose other ports"
        return CheckJudgement("fail", facts["taken"], "free", "", "node", remedy)
    return CheckJudgement("pass", facts["asked"], "free")


PORTS = Check("ports", "a `--port` is taken", measure, judge, limit="free", source="ours")
