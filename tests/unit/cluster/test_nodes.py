"""Node lists, bad-node files, ports and addresses."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shakedown.cluster import nodes
from shakedown.core.errors import UsageError


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
    assert nodes.expand_nodelist(text) == names


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

    assert nodes.expand_nodelist(text) == shown.stdout.split()


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
        nodes.expand_nodelist(text)


@given(st.text(max_size=60))
def test_any_text_gives_node_names_or_a_usage_error(text: str) -> None:
    try:
        names = nodes.expand_nodelist(text)
    except UsageError:
        return
    assert names
    assert all(nodes.is_node_name(name) for name in names)


def test_allocation_nodes_come_from_slurm_when_there() -> None:
    assert nodes.allocation_nodes({"SLURM_JOB_NODELIST": "n[1-2]"}) == ["n1", "n2"]


def test_allocation_is_this_host_without_slurm() -> None:
    assert nodes.allocation_nodes({}) == [socket.gethostname()]


def test_node_name_is_slurms_where_nodes_share_a_host() -> None:
    assert nodes.node_name({"SLURMD_NODENAME": "n3"}) == "n3"


def test_free_ports_are_different_and_can_be_bound() -> None:
    ports = nodes.free_ports(5)

    assert len(set(ports)) == 5
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


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


def test_bad_nodes_survive_a_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "bad_nodes.txt"

    nodes.write_bad_nodes(file, ["n2", "n1", "n2"])

    assert file.read_text() == "n1\nn2\n"
    assert nodes.read_bad_nodes(file) == ["n1", "n2"]


def test_no_bad_nodes_is_an_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "bad_nodes.txt"

    nodes.write_bad_nodes(file, [])

    assert file.read_text() == ""
    assert nodes.read_bad_nodes(file) == []


def test_bad_nodes_may_be_missing_or_hold_comments(tmp_path: Path) -> None:
    file = tmp_path / "bad_nodes.txt"
    assert nodes.read_bad_nodes(file) == []

    file.write_text("# since Monday\n\nn1  # fan\n")

    assert nodes.read_bad_nodes(file) == ["n1"]


@pytest.mark.parametrize("line", ["n1 --uid=0", "n1,n2", "../x", "$(id)"])
def test_bad_nodes_refuse_lines_that_would_become_options(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad_nodes.txt"
    file.write_text(f"n0\n{line}\n")

    with pytest.raises(UsageError, match="line 2"):
        nodes.read_bad_nodes(file)


def test_writing_refuses_what_is_no_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a node name"):
        nodes.write_bad_nodes(tmp_path / "bad_nodes.txt", ["n1\nn2"])


def test_without_keeps_the_order() -> None:
    assert nodes.without(["n3", "n1", "n2"], ["n1"]) == ["n3", "n2"]
