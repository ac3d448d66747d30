"""Bad-node files and ports."""

import socket
from pathlib import Path

import pytest

from shakedown.cluster import nodes
from shakedown.core.errors import UsageError


def test_free_ports_are_different_and_can_be_bound() -> None:
    ports = nodes.free_ports(5)

    assert len(set(ports)) == 5
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


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
