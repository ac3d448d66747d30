"""An interrupted run of pytest leaves no process behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_daemon_ends_with_the_pytest_that_was_ended(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "test_daemon.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib, subprocess, time
            def test_daemon():
                pathlib.Path("daemon.tmp").write_text(
                    str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
                )
                os.rename("daemon.tmp", "daemon")
                time.sleep(600)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "--rootdir", str(tmp_path)]
    with subprocess.Popen(
        [*command, "test_daemon.py"], cwd=tmp_path, env=environment, start_new_session=True
    ) as run:
        noted = tmp_path / "daemon"
        _wait(noted.exists)
        daemon = int(noted.read_text())
        assert Path(f"/proc/{daemon}").exists()
        run.send_signal(how)
    _wait(lambda: not Path(f"/proc/{daemon}").exists())


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
