"""Links, FIFOs and files that another user puts in the place of what a run writes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shakedown.cluster.supervise import Component, Supervisor
from shakedown.core import private
from shakedown.core.errors import UntrustedError
from shakedown.core.paths import ServerPaths
from shakedown.inference.idle_limit import IdleTimer
from shakedown.inference.server import stop
from shakedown.monitor import hook
from shakedown.monitor.heartbeat import Heartbeat
from shakedown.training.metrics.record import MetricsLog
from shakedown.training.stage import stopping
from tests.security.neighbour import as_neighbour


def write_log(path: Path) -> None:
    with Supervisor() as supervisor:
        supervisor.start(Component("a", "test", ("echo", "hit"), path))


def write_request(path: Path) -> None:
    hook._write(path, b"hit")


WRITERS: dict[str, Callable[[Path], object]] = {
    "log": write_log,
    "metrics": lambda path: MetricsLog(path).append({"step": 1}),
    "lease": lambda path: IdleTimer(path).reset(),
    "stop file": lambda path: stopping.ask(path, "hit"),
    "opened": lambda path: os.close(private.open_own(path, os.O_WRONLY)),
}


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "FIFO", "his file"])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_neighbour_puts_in_the_place_of_a_file_is_not_written(
    writer: str, kind: str, shared: Path, profile: Path
) -> None:
    path = shared / "file"
    if kind == "symbolic link":
        as_neighbour("ln", "-s", profile, path)
    elif kind == "hard link":  # most kernels let only its owner make it
        path.hardlink_to(profile)
    elif kind == "FIFO":
        as_neighbour("mkfifo", path)
    else:
        as_neighbour("sh", "-c", f"umask 0; : > {path}")
    with pytest.raises(UntrustedError):
        WRITERS[writer](path)
    assert profile.read_text() == "precious"
    assert profile.stat().st_mtime == 1
    assert path.is_symlink() or not path.is_file() or path.stat().st_size in (0, 8)


def test_a_link_in_the_place_of_a_lease_changes_nothing(shared: Path, profile: Path) -> None:
    folder = ServerPaths(shared / "policy")
    folder.root.mkdir(0o755)
    lease = folder.root / ".lease"
    lease.mkdir(0o700)
    (lease / "1").symlink_to(profile)
    with pytest.raises(UntrustedError, match="is a link"):
        stop(folder.root)
    assert profile.read_text() == "precious"


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_link_or_fifo_in_the_place_of_a_heartbeat_stops_no_rank(
    kind: str, shared: Path, profile: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = shared / "trainer-rank0.beat"
    as_neighbour(*(("ln", "-s", profile) if kind == "link" else ("mkfifo",)), path)
    heartbeat = Heartbeat(shared, 0)
    heartbeat.beat(phase="train")
    heartbeat.close()

    assert heartbeat.failures > 0
    assert profile.read_text() == "precious"
    assert "is a link or a FIFO" in capfd.readouterr().err


def test_a_dump_replaces_a_link_and_leaves_what_it_leads_to(shared: Path, profile: Path) -> None:
    as_neighbour("ln", "-s", profile, shared / "fr-trainer-rank0.json")
    write_request(shared / "fr-trainer-rank0.json")

    assert (shared / "fr-trainer-rank0.json").read_text() == "hit"
    assert profile.read_text() == "precious"
