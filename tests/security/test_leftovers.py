"""What a killed process leaves goes at the next start of a writer; nobody else's file does."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shakedown.cluster.supervise import Component, Supervisor
from shakedown.core import leftovers
from shakedown.core.files import write_text

WRITE = """
import sys, time
from pathlib import Path
from shakedown.core.files import atomic_open
with atomic_open(Path(sys.argv[1])) as stream:
    stream.write("half of it")
    stream.flush()
    print("writing", flush=True)
    time.sleep(60)
"""
FILL = """
import sys, time
from pathlib import Path
from shakedown.core.folders import staged_folder
with staged_folder(Path(sys.argv[1])) as staged:
    (staged / "weights").write_text("half of it")
    print("writing", flush=True)
    time.sleep(60)
"""
NEXT = "import sys; from pathlib import Path; from shakedown.core.files import write_text; "
NEXT += "write_text(Path(sys.argv[1]), 'whole')"
BIND = """
import os, socket, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.path.join(os.environ["TMPDIR"], "0123456789abcdef0123456789abcdef0123"))
listener.listen()
time.sleep(60)
"""


def begin(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that has begun to write."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder with a short path that everybody may write, as /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def neighbour() -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Runs a command as another user."""
    if os.getuid():
        pytest.skip("only root can act as another user")
    nobody = pwd.getpwnam("nobody")

    def act(*command: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            list(map(str, command)),
            check=False,
            capture_output=True,
            user=nobody.pw_uid,
            group=nobody.pw_gid,
            extra_groups=[],
        )

    return act


@pytest.mark.parametrize("program", [WRITE, FILL])
def test_what_kill_9_left_goes_at_the_next_start_and_what_is_being_written_stays(
    program: str, tmp_path: Path
) -> None:
    killed, living = begin(program, tmp_path / "killed"), begin(program, tmp_path / "living")
    try:
        kill(killed)
        assert len(names(tmp_path)) == 2

        subprocess.run([sys.executable, "-c", NEXT, tmp_path / "killed"], check=True)

        (left, whole) = names(tmp_path)
        assert left.startswith(".living.tmp-")
        assert whole == "killed"
    finally:
        kill(living)


def test_a_process_id_that_was_given_again_protects_no_leftover(tmp_path: Path) -> None:
    own = leftovers.temporary_prefix(tmp_path / "a")
    first = own[: own.rindex("-")]
    (tmp_path / f"{first}-1.abcdefgh").touch()  # this process id, another start
    (tmp_path / f"{own}abcdefgh").touch()

    leftovers.sweep(tmp_path)

    assert names(tmp_path) == [f"{own}abcdefgh"]


def test_a_leftover_of_another_machine_or_another_program_stays(tmp_path: Path) -> None:
    kept = [".a.json.x8d_k2ab", ".a.old.abcdefgh", ".a.tmp-00000000-1-1.abcdefgh", "a.json"]
    for name in kept:
        (tmp_path / name).touch()

    leftovers.sweep(tmp_path)

    assert names(tmp_path) == kept


def test_a_link_with_a_leftovers_name_goes_and_what_it_points_to_stays(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints"
    write_text(target / "weights", "precious")
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / orphan(folder)).symlink_to(target)

    leftovers.sweep(folder)

    assert names(folder) == []
    assert (target / "weights").read_text() == "precious"


def orphan(folder: Path) -> str:
    """A name as a process of this machine that is gone would have given."""
    own = leftovers.temporary_prefix(folder / "a")
    machine = own.split("-")[1]
    return f".a.tmp-{machine}-{2**22:x}-1.abcdefgh"


def test_a_neighbours_file_with_a_leftovers_name_stays(
    shared: Path, neighbour: Callable[..., subprocess.CompletedProcess[bytes]]
) -> None:
    name = orphan(shared)
    assert neighbour("ln", "-s", "/etc", shared / name).returncode == 0

    leftovers.sweep(shared)

    assert names(shared) == [name]


def test_a_neighbour_cannot_reach_an_engines_sockets_and_they_go_with_it(
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    neighbour: Callable[..., subprocess.CompletedProcess[bytes]],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    engine = (sys.executable, "-c", BIND)
    with Supervisor() as supervisor:
        part = Component("policy", "inference", engine, shared / "log", own_temporary=True)
        supervisor.start(part)
        socket = _socket(shared)

        assert socket.is_socket()
        assert len(os.fsencode(socket)) <= 107
        assert neighbour("ls", shared).returncode == 0
        assert neighbour("ls", socket.parent).returncode != 0
        assert neighbour("ls", socket).returncode != 0
    assert names(shared) == ["log"]


def _socket(shared: Path) -> Path:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = list(shared.glob(".engine.*/*"))
        if found:
            return found[0]
        time.sleep(0.05)
    raise AssertionError((shared / "log").read_text())


def test_a_component_gets_no_folder_of_its_own_unless_it_asks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = (sys.executable, "-c", "import os; print(os.environ.get('TMPDIR'))")
    with Supervisor() as supervisor:
        supervisor.start(Component("a", "trainer", command, log, {"TMPDIR": "/given"}))
        while supervisor.running():
            time.sleep(0.02)
    assert log.read_text() == "/given\n"


def test_the_folder_of_an_engine_whose_supervisor_was_killed_goes_at_the_next_start(
    shared: Path,
) -> None:
    program = """
import sys, tempfile, time
from pathlib import Path
from shakedown.core.leftovers import private_folder
tempfile.tempdir = sys.argv[1]
with private_folder("engine") as made:
    (made / "socket").touch()
    print("writing", flush=True)
    time.sleep(int(sys.argv[2]))
"""
    first = begin(program, shared, 60)
    os.kill(first.pid, signal.SIGKILL)
    kill(first)
    (left,) = names(shared)

    second = begin(program, shared, 0)
    second.communicate()

    assert left.startswith(".engine.tmp-")
    assert names(shared) == []


def test_where_temporary_folders_have_long_paths_sockets_lie_in_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))

    with leftovers.private_folder("engine") as made:
        assert made.parent == Path("/tmp")  # noqa: S108 - the place that is meant
        assert made.stat().st_mode & 0o777 == 0o700
