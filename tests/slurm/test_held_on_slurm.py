"""A folder that a job on another node holds: taken over once Slurm says that the job has ended."""

import contextlib
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shakedown.cluster.folder_lease import hold
from shakedown.core.errors import RefusedError
from shakedown.core.lease import Holder
from tests.slurm_fixtures import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# An array task, which Slurm's lists call otherwise than its own SLURM_JOB_ID does.
HOLDS = """
import json, os, time
from dataclasses import asdict
from shakedown.core.files import write_json
from shakedown.core.lease import Holder
from pathlib import Path
write_json(Path("holder.json"), asdict(Holder.here("shakedown train sft")))
while not os.path.exists("go"):
    time.sleep(0.1)
"""


def test_a_folder_is_refused_while_the_job_runs_and_taken_over_when_it_has_ended(
    tmp_path: Path, slurm_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm_env.items():
        monkeypatch.setenv(name, value)
    script = f"#!/bin/sh\nexec {sys.executable} - <<'END'\n{HOLDS}\nEND\n"
    command = ["sbatch", "--parsable", "--array=3", f"--chdir={tmp_path}"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=True)
    wait_for((tmp_path / "holder.json").exists, "the job's holder")
    holder = Holder(**json.loads((tmp_path / "holder.json").read_text()))
    # As from a node of its own: the test's nodes share this machine.
    there = asdict(replace(holder, host="node9", boot="another"))
    lease = tmp_path / "stage" / ".lease" / "7"
    lease.parent.mkdir(parents=True, mode=0o700)
    lease.touch(0o600)
    lease.write_text(json.dumps(there))
    monkeypatch.setenv("SLURM_CLUSTER_NAME", holder.cluster)
    # Of a shell that would hide the job: unseen is not ended.
    for name, value in (("SQUEUE_STATES", "COMPLETED"), ("SLURM_CLUSTERS", "elsewhere")):
        monkeypatch.setenv(name, value)

    def taken() -> bool:
        with contextlib.suppress(RefusedError), hold(tmp_path / "stage", "the next") as fence:
            return fence.number == 8
        return False

    assert holder.cluster
    named = f"on node9, Slurm job {done.stdout.strip()}_3\\)"
    with pytest.raises(RefusedError, match=named), hold(tmp_path / "stage", "too early"):
        pass
    (tmp_path / "go").touch()
    wait_for(taken, "the job's end")
