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
        *arguments: str, timeout: float = 1400, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        ours = ("SNAKEMAKE", "OMP_NUM_THREADS")  # a user's shell has neither
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        environment |= more or {}
        command = [sys.executable, "-m", "snakemake", "--nolock", *arguments]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # Killed, it would leave its stages behind, which slow all other tests down.
            process.terminate()
            print(process.communicate(timeout=60)[0][-20000:])
            raise
        print(output[-20000:])
        return subprocess.CompletedProcess(command, process.returncode, output)

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
