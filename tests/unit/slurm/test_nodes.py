"""What Slurm's controller says of nodes."""

from pathlib import Path

import pytest

from shakedown.core.errors import UsageError
from shakedown.slurm import nodes
from tests.unit.slurm.programs import answers

NODES = """\
n1|draining|bad disk
n1|draining|bad disk
n2|allocated|none
n3|down*|Not responding
"""


def test_address_is_the_name_outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    assert nodes.node_address("n1") == "n1"


def test_addresses_come_from_scontrol_inside_a_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\necho 'NodeName=n1 Arch=x NodeAddr=10.0.0.1 NodeHostName=h'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "1")

    assert nodes.node_addresses(["n1", "n2"]) == {"n1": "10.0.0.1", "n2": "n2"}


def test_address_refuses_what_is_no_name() -> None:
    with pytest.raises(UsageError, match="not a node name"):
        nodes.node_address("--all")


def test_nodes_that_are_down_or_drained_are_told_once_each(programs: Path) -> None:
    answers(programs, "sinfo", NODES)

    assert nodes.node_troubles(["n[1-3]"], seconds=5.0) == [
        "node n1 is draining: bad disk",
        "node n3 is down and does not answer Slurm: Not responding",
    ]
