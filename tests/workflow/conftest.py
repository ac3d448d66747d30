"""Runs of the real workflow."""

import os
import subprocess
import sys

import pytest

from shakedown.core.paths import RunPaths
from tests.workflow.helpers import ROOT, Demo, Run


@pytest.fixture(scope="session")
def run_workflow() -> Run:
    """Run snakemake as a user does; output is captured, and printed when a test fails."""

    def run(*arguments: str, timeout: float = 840) -> subprocess.CompletedProcess[str]:
        ours = ("SNAKEMAKE", "OMP_NUM_THREADS")  # a user's shell has neither
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        result = subprocess.run(
            [sys.executable, "-m", "snakemake", "--nolock", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=ROOT,
            env=environment,
            timeout=timeout,
        )
        print(result.stdout[-20000:])
        return result

    return run


@pytest.fixture(scope="session")
def demo(run_workflow: Run, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The run of `make demo`, in a folder of its own. Tests leave it as it is."""
    results = tmp_path_factory.mktemp("results")
    done = run_workflow("--config", f"results={results}")
    return RunPaths(results / "demo"), done
