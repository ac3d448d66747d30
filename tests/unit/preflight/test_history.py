"""What is kept of nodes over runs, and whom later jobs keep off."""

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from shakedown.core.errors import StorageError
from shakedown.preflight.history import (
    NodeLook,
    exclude_known,
    excluded,
    forgive,
    records,
    remember,
)

HOUR = 3600.0
NOW = 1_000_000.0


def look(node: str, hours_ago: float, *, ok: bool = False, reason: str = "reach") -> NodeLook:
    return NodeLook(NOW - hours_ago * HOUR, "run", node, ok, "" if ok else reason)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "node_history.sqlite"


def test_a_node_that_failed_is_kept_off_until_the_time_is_over(path: Path) -> None:
    remember(path, [look("n1", 1), look("n2", 30), look("n3", 1, ok=True)])

    assert set(excluded(path, 24, NOW)) == {"n1"}
    assert set(excluded(path, 48, NOW)) == {"n1", "n2"}
    assert excluded(path, 0, NOW) == {}


def test_a_node_that_has_passed_since_is_in_use_again(path: Path) -> None:
    remember(path, [look("n1", 2)])
    remember(path, [look("n1", 1, ok=True)])

    assert excluded(path, 24, NOW) == {}
    assert records(path)[0].failures == 1


def test_repeated_offenders_come_first_with_what_failed(path: Path) -> None:
    remember(path, [look("n1", 3), look("n2", 3, reason="xid"), look("n2", 2, reason="gpus")])

    first, second = records(path)

    assert (first.node, first.failures, first.looks) == ("n2", 2, 2)
    assert list(first.reasons) == ["gpus", "xid"]
    assert second.node == "n1"


def test_a_repaired_node_can_be_forgotten(path: Path) -> None:
    remember(path, [look("n1", 1), look("n2", 1)])

    assert forgive(path, "n1") == 1
    assert set(excluded(path, 24, NOW)) == {"n2"}


def test_without_a_history_nobody_is_kept_off_and_no_file_is_made(path: Path) -> None:
    target = path.with_name("excluded.txt")

    assert records(path) == []
    assert exclude_known(path, 24, target) == []
    assert target.read_text() == ""
    assert not path.exists()


def test_a_file_of_something_else_is_an_error_and_stays_as_it_is(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database" * 1000)

    with pytest.raises(StorageError, match="move it away"):
        remember(path, [look("n1", 1)])

    assert path.read_bytes() == b"no database" * 1000


def test_who_writes_the_list_waits_for_a_judgement_that_is_being_added(
    path: Path, tmp_path: Path
) -> None:
    remember(path, [NodeLook(time.time(), "r", "n1", ok=False)])
    with closing(sqlite3.connect(path, check_same_thread=False)) as other:
        other.execute("INSERT INTO looks VALUES (?, 'r', 'n2', 0, 'reach')", (time.time(),))
        threading.Timer(0.5, other.commit).start()

        assert exclude_known(path, 24, tmp_path / "excluded") == ["n1", "n2"]
