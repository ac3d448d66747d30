"""Short lists of nodes, and names."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shakedown.core.errors import UsageError
from shakedown.slurm import hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-4,7],m08", ["n1", "n2", "n3", "n4", "n7", "m08"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu-[001,003]-ib", ["gpu-001-ib", "gpu-003-ib"]),
        ("a.b.example", ["a.b.example"]),
    ],
)
def test_expands_slurm_lists(text: str, names: list[str]) -> None:
    assert hostlist.expand_nodelist(text) == names


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm is not installed")
@pytest.mark.parametrize("text", ["n[1-4,7],m08", "r[1-2]n[01-02]", "n[9-11]"])
def test_expands_as_scontrol_does(text: str, tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=n1\n")
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={**os.environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert hostlist.expand_nodelist(text) == shown.stdout.split()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n[1",
        "n]",
        "n[]",
        "n[1-]",
        "n[4-1]",
        "n[1-999999999]",
        "n[1-60000]m[1-60000]",
        "a,,b",
        "n[[1]]",
        "-rf",
        "$(id)",
        "a b",
        "a\nb",
        "n[a-c]",
        "n[1-3]/../x",
    ],
)
def test_refuses_hostile_lists(text: str) -> None:
    with pytest.raises(UsageError, match="not a Slurm host list"):
        hostlist.expand_nodelist(text)


@given(st.text(max_size=60))
def test_any_text_gives_node_names_or_a_usage_error(text: str) -> None:
    try:
        names = hostlist.expand_nodelist(text)
    except UsageError:
        return
    assert names
    assert all(hostlist.is_node_name(name) for name in names)


def test_allocation_nodes_come_from_slurm_when_there() -> None:
    assert hostlist.allocation_nodes({"SLURM_JOB_NODELIST": "n[1-2]"}) == ["n1", "n2"]


def test_allocation_is_this_host_without_slurm() -> None:
    assert hostlist.allocation_nodes({}) == [socket.gethostname()]


def test_node_name_is_slurms_where_nodes_share_a_host() -> None:
    assert hostlist.node_name({"SLURMD_NODENAME": "n3"}) == "n3"
