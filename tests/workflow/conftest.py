"""Runs of the real workflow."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from shakedown.core.paths import RunPaths
from tests.security.census import Census
from tests.workflow.helpers import ROOT, Demo, Run


@pytest.fixture(scope="session")
def run_workflow() -> Run:
    """Run snakemake as a user does; output is captured, and printed when a test fails."""

    def run(
        *arguments: str, timeout: float = 840, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        ours = ("SNAKEMAKE", "OMP_NUM_THREADS")  # a user's shell has neither
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        environment |= more or {}
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
def census() -> Census:
    """Who listened while the demo ran."""
    return Census()


@pytest.fixture(scope="session")
def demo(run_workflow: Run, census: Census, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The run of `make demo`, in a folder of its own. Tests leave it as it is."""
    results = tmp_path_factory.mktemp("results")
    with census:
        done = run_workflow("--config", f"results={results}", more=census.environment)
    return RunPaths(results / "demo"), done
