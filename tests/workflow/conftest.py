"""Runs of the real workflow."""

import os
import subprocess
import sys

import pytest

from tests.workflow.helpers import ROOT, Run


@pytest.fixture(scope="session")
def run_workflow() -> Run:
    """Run snakemake as a user does; output is captured, and printed when a test fails."""

    def run(*arguments: str, timeout: float = 840) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SNAKEMAKE")}
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
