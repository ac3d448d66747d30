"""The software environment, to compare over nodes."""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import shakedown
from shakedown.preflight.model import Facts, ProbeRequest, has_fault

# UCX_ and FI_ (libfabric) are the transports below NCCL and MPI.
_COMPARED = re.compile(
    r"(NCCL|GLOO|TORCH|VLLM|SGLANG|UCX|FI|PYTORCH)_.*|HF_HOME|HF_HUB_OFFLINE|HF_ENDPOINT"
    r"|TRANSFORMERS_OFFLINE|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|CUDA_HOME|OMP_NUM_THREADS"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS", re.IGNORECASE)


def environment(request: ProbeRequest, node: str) -> Facts:
    """Versions of python and of every installed package, and the variables that matter."""
    injected = has_fault(request.faults, "version_skew", node)
    return local_environment({"torch": "0.0.0+fault"} if injected else {})


def local_environment(replaced: Mapping[str, str] = MappingProxyType({})) -> Facts:
    """This process's environment; secrets are never read into it. `replaced`: other versions."""
    packages: dict[str, str] = {}
    for dist in metadata.distributions(path=_import_path()):
        if dist.metadata["Name"]:
            packages.setdefault(_normal(dist.metadata["Name"]), dist.version)  # as import has it
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "shakedown": shakedown.__version__,
        "packages": dict(sorted({**packages, **replaced}.items())),
        "digest": digest({**packages, **replaced}),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _COMPARED.fullmatch(name) and not _SECRET.search(name)
        },
    }


def _import_path() -> list[str]:
    """Without setuptools' own copies: they join the path of a process that imports setuptools."""
    return [entry for entry in sys.path if Path(entry).parts[-2:] != ("setuptools", "_vendor")]


def digest(packages: Mapping[str, str]) -> str:
    """A short hash of all names and versions."""
    text = "\n".join(f"{name}=={version}" for name, version in sorted(packages.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _normal(name: str) -> str:
    # The normal form of a distribution's name, by PyPA's rules (PEP 503).
    return re.sub(r"[-_.]+", "-", name).lower()
