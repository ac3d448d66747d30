"""The supervisor's words and its refusals; tests/faults kills real processes."""

import sys
from pathlib import Path

import pytest

from shakedown.cluster.supervise import Component, Supervisor, describe_exit
from shakedown.core.errors import LaunchError, StorageError


def component(name: str, log: Path, *argv: str, **env: str) -> Component:
    return Component(name, "test", argv, log, env)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL (out of memory?)"),
        (-15, "killed by SIGTERM"),
        (-63, "killed by signal 63"),
        (137, "exit code 137 (a process under it: SIGKILL (out of memory?))"),
        (255, "exit code 255"),
    ],
)
def test_describe_exit(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_missing_program_is_a_launch_error_with_the_reason(tmp_path: Path) -> None:
    with Supervisor() as supervisor, pytest.raises(LaunchError, match="No such file"):
        supervisor.start(component("a", tmp_path / "a.log", "/nonexistent/program"))


@pytest.mark.parametrize("argv", [(), ("",), ("a\0b",)])
def test_impossible_commands_are_launch_errors(tmp_path: Path, argv: tuple[str, ...]) -> None:
    with Supervisor() as supervisor, pytest.raises(LaunchError):
        supervisor.start(component("a", tmp_path / "a.log", *argv))


def test_a_log_that_cannot_be_opened_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with Supervisor() as supervisor, pytest.raises(StorageError, match="cannot open log"):
        supervisor.start(component("a", tmp_path / "file" / "a.log", "true"))


def test_a_running_name_is_refused_and_an_ended_one_restarts(tmp_path: Path) -> None:
    part = component("a", tmp_path / "a.log", "sleep", "60")
    with Supervisor() as supervisor:
        supervisor.start(part)
        with pytest.raises(ValueError, match="already running"):
            supervisor.start(part)
        supervisor.stop_all(5)
        supervisor.start(part)
        assert list(supervisor.running()) == ["a"]


def test_start_outside_the_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outside"):
        Supervisor().start(component("a", tmp_path / "a.log", "true"))


def test_output_of_both_streams_is_appended_unbuffered(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "a.log"
    code = "import os,sys; print(os.environ['X'], os.environ['PYTHONUNBUFFERED']); sys.exit('bad')"
    with Supervisor() as supervisor:
        for _ in range(2):
            supervisor.start(component("a", log, sys.executable, "-c", code, X="hello"))
            while supervisor.running():
                pass
            (ended,) = supervisor.poll()
            assert ended.returncode == 1

    assert log.read_text() == "hello 1\nbad\n" * 2


def test_poll_reports_each_end_once(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        supervisor.start(component("a", tmp_path / "a.log", "sh", "-c", "exit 3"))
        while supervisor.running():
            pass

        first, second = supervisor.poll(), supervisor.poll()

    assert [(e.component.name, e.returncode) for e in first] == [("a", 3)]
    assert str(first[0]).startswith("a exit code 3 after")
    assert second == []
