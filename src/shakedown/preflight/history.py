"""Each node's pass/fail history over all runs, in one SQLite file beside their results.

Later jobs avoid a node that failed until it passes again or the time is over; repeated failures
show up. A damaged file, or one of another program, is an error and is left unchanged.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from shakedown.cluster.nodes import write_bad_nodes
from shakedown.core.errors import StorageError
from shakedown.core.private import make_folders

_TABLE = (
    "CREATE TABLE IF NOT EXISTS looks"
    " (time REAL NOT NULL, run TEXT NOT NULL, node TEXT NOT NULL, ok INTEGER NOT NULL,"
    " reason TEXT NOT NULL)"
)
_LOCK_SECONDS = 30.0  # another run's preflight may be writing
REPEATED = 2  # failures that make a repeat offender


@dataclass(frozen=True)
class NodeLook:
    """One judgement of a node. `time`: seconds since the epoch; `reason`: what failed."""

    time: float
    run: str
    node: str
    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class NodeRecord:
    """A node over all runs. `last` is its newest judgement, `reasons` its failures, newest
    first."""

    node: str
    looks: int
    failures: int
    last: NodeLook
    reasons: Sequence[str]


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        make_folders(path.parent)
        with closing(sqlite3.connect(path, timeout=_LOCK_SECONDS)) as base, base:
            base.execute(_TABLE)
            yield base
    except (sqlite3.Error, OSError) as error:
        raise StorageError(
            f"cannot use the nodes' history {path}: {error}",
            hint=f"move it away: mv {path} {path}.old",
        ) from error


def remember(path: Path, looks: Iterable[NodeLook]) -> None:
    """Add judgements.

    Raises:
        StorageError: the file cannot be written or is not a history.
    """
    rows = [(look.time, look.run, look.node, look.ok, look.reason) for look in looks]
    if rows:
        with _opened(path) as base:
            base.executemany("INSERT INTO looks VALUES (?, ?, ?, ?, ?)", rows)


def records(path: Path) -> list[NodeRecord]:
    """Every node's record, most failures first; empty without a file.

    Raises:
        StorageError: the file cannot be read or is not a history.
    """
    if not path.exists():
        return []
    with _opened(path) as base:
        rows = base.execute("SELECT time, run, node, ok, reason FROM looks ORDER BY time DESC")
        by_node: dict[str, list[NodeLook]] = {}
        for when, run, node, ok, reason in rows:
            by_node.setdefault(node, []).append(NodeLook(when, run, node, bool(ok), reason))
    found = [
        NodeRecord(
            node,
            len(looks),
            sum(not look.ok for look in looks),
            looks[0],
            list(dict.fromkeys(look.reason for look in looks if not look.ok)),
        )
        for node, looks in by_node.items()
    ]
    return sorted(found, key=lambda record: (-record.failures, record.node))


def excluded(path: Path, hours: float, now: float | None = None) -> dict[str, NodeLook]:
    """Node -> its last failure, for nodes that failed within these hours and have not passed since.

    Raises:
        StorageError: the file cannot be read or is not a history.
    """
    since = (time.time() if now is None else now) - hours * 3600
    found = {record.node: record.last for record in records(path)}
    return {node: look for node, look in found.items() if not look.ok and look.time > since}


def exclude_known(path: Path, hours: float, target: Path) -> list[str]:
    """Write the names of `excluded` to `target`, the file of nodes that every later job avoids.

    Raises:
        StorageError: a file cannot be read or written.
    """
    if not path.exists():
        write_bad_nodes(target, [])
        return []
    with _opened(path) as base:
        base.execute(
            "BEGIN IMMEDIATE"
        )  # so that of two writers none replaces a newer list by an older one
        names = sorted(excluded(path, hours))
        write_bad_nodes(target, names)
    return names


def forgive(path: Path, node: str) -> int:
    """Forget a repaired node; returns how many judgements it had.

    Raises:
        StorageError: the file cannot be written or is not a history.
    """
    with _opened(path) as base:
        return base.execute("DELETE FROM looks WHERE node = ?", (node,)).rowcount
