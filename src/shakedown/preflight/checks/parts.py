"""The run's own code: agent, reward and metrics sinks, imported and called once on the node."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from shakedown.core.errors import ExitCode
from shakedown.preflight.check import Check, CheckJudgement
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest

# In a higher layer, as it knows how agents, rewards and sinks are loaded.
_MODULE = "shakedown.training.smoke_test"
_SHARE = 0.8  # share of the check's limit for all parts at once, so that the slow one is named


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """`faults`: part -> its error if it cannot be used, `raised`: if its own code raised."""
    want = request.want
    started = {" ".join(part): _start(part, want.model) for part in want.parts}
    deadline = time.monotonic() + request.limit * _SHARE
    facts: dict[str, dict[str, str]] = {"faults": {}, "raised": {}}
    for part, process in started.items():
        try:
            said = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[1]
        except subprocess.TimeoutExpired:
            _end(process)
            facts["faults"][part] = f"did not finish within {request.limit * _SHARE:g} s"
            continue
        if process.returncode:
            lines = said.strip().splitlines() or [f"ended with {process.returncode}"]
            kind = "raised" if process.returncode == ExitCode.UNKNOWN else "faults"
            facts[kind][part] = lines[-1][:400]
    return facts


def _start(part: Sequence[str], model: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, *part, f"--model={model}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,  # so that its children end with it
    )


def _end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stderr:
        process.stderr.close()


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:
    """Each must load; own code that raises may only dislike the made-up question."""
    expected = "imported and called once"
    remedy = "to reproduce: python -m shakedown.training.smoke_test KIND NAME [KWARGS]"
    if facts["faults"]:
        return CheckJudgement("fail", facts["faults"], expected, "", "user", remedy)
    if facts["raised"]:
        return CheckJudgement("warn", facts["raised"], expected, "", "user", remedy)
    return CheckJudgement("pass", [" ".join(part) for part in want.parts], expected)


PARTS = Check(
    "parts",
    "the run's reward or agent cannot be imported or breaks its contract; a metrics sink lacks its "
    "package or key (only whether it is set is checked); warns: reward or agent raise on a "
    "made-up question",
    measure,
    judge,
    needs="parts",
    limit="four fifths of `--timeout`",
    source="prime-rl's guide: check that the environment is installed before training",
)
