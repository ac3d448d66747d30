"""The software environment, compared across nodes."""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from shakedown.preflight.check import Check, CheckJudgement, Fleet, unlike_most
from shakedown.preflight.datatypes import NodeFacts, ProbeRequest

# UCX_ and FI_ (libfabric) configure the transports below NCCL and MPI.
_COMPARED = re.compile(
    r"(NCCL|GLOO|TORCH|VLLM|SGLANG|UCX|FI|PYTORCH)_.*|HF_HOME|HF_HUB_OFFLINE|HF_ENDPOINT"
    r"|TRANSFORMERS_OFFLINE|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|CUDA_HOME|OMP_NUM_THREADS"
)
_EXPECTED = "the same on all nodes and here"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS", re.IGNORECASE)


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """Versions of python and of every installed package, and the relevant variables."""
    return local_environment()


def local_environment() -> NodeFacts:
    """This process's environment, without secrets."""
    packages: dict[str, str] = {}
    for dist in metadata.distributions(path=_import_path()):
        if dist.metadata["Name"]:
            packages.setdefault(_normal(dist.metadata["Name"]), dist.version)  # as import does
    return {
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items())),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _COMPARED.fullmatch(name) and not _SECRET.search(name)
        },
    }


def _import_path() -> list[str]:
    """Search paths without setuptools' own copies, which importing setuptools adds."""
    return [entry for entry in sys.path if Path(entry).parts[-2:] != ("setuptools", "_vendor")]


def _normal(name: str) -> str:
    # A distribution's normalised name, by PyPA's rules (PEP 503).
    return re.sub(r"[-_.]+", "-", name).lower()


def compare(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """Compare python and packages with the most common ones; the command's own break a tie."""
    rows = {node: _software(facts) for node, facts in fleet.facts("environment").items()}
    remedy = "use one shared environment, or install the same packages"
    return {
        node: CheckJudgement("fail", other, _EXPECTED, "", "environment", remedy)
        if other
        else CheckJudgement("pass", digest(rows[node]), _EXPECTED)
        for node, other in unlike_most(rows, _software(fleet.command)).items()
    }


def compare_variables(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """Variables that change what NCCL, gloo, torch and the engines do."""
    rows = {node: facts["variables"] for node, facts in fleet.facts("environment").items()}
    own = fleet.command["variables"] if fleet.command else {}
    remedy = "set them in the job script, not in a node's profile"
    return {
        node: CheckJudgement("warn", other, _EXPECTED, "", "environment", remedy)
        for node, other in unlike_most(rows, own).items()
        if other
    }


def _software(facts: NodeFacts | None) -> dict[str, str]:
    return {"python": facts["python"], **facts["packages"]} if facts else {}


def digest(versions: Mapping[str, str]) -> str:
    """A short hash of all names and versions."""
    text = "\n".join(f"{name}=={version}" for name, version in sorted(versions.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


ENVIRONMENT = Check(
    "environment",
    "python or package versions differ from most nodes and this command",
    measure,
    compare=compare,
    limit="equal",
    source="ours",
)
VARIABLES = Check(
    "variables",
    "warns: NCCL_*, GLOO_*, VLLM_*, ... variables differ from most nodes. Variables that look "
    "like secrets are not read",
    compare=compare_variables,
    limit="equal",
    source="ours",
)
