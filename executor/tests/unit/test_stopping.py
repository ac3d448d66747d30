"""What ends this process from outside, and the command that goes on after it."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from snakemake_executor_plugin_submitit.executor import same_command

# Says what it hears, a line each; `quit` ends it.
LISTENS = """
import signal, sys
from snakemake_executor_plugin_submitit.executor import EndSignals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
stop = EndSignals()
stop.listen()
said = "up"
while True:
    try:
        print(said, flush=True)
        if sys.stdin.readline().strip() == "quit":
            break
        said = f"heard nothing {stop.leaves_jobs}"
    except KeyboardInterrupt:
        said = f"interrupted {stop.by.name} {stop.leaves_jobs}"
"""


class Listener:
    """A process that listens to signals; SIGHUP was ignored before it did."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        assert self.line() == "up"

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ask(self) -> str:
        """What it says to a word."""
        self._say("word")
        return self.line()

    def quit(self) -> int:
        self._say("quit")
        return self._process.wait(60)

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Listener(process)
        process.kill()


def test_the_first_ctrl_c_interrupts_once_and_cancels_the_jobs(listener: Listener) -> None:
    listener.send(signal.SIGINT)
    first = listener.line()
    listener.send(signal.SIGINT)
    listener.send(signal.SIGTERM)

    assert first == "interrupted SIGINT False"
    assert listener.ask() == "heard nothing False"
    assert listener.quit() == 0


def test_sigterm_leaves_the_jobs_whatever_comes_after_it(listener: Listener) -> None:
    listener.send(signal.SIGTERM)
    first = listener.line()
    listener.send(signal.SIGINT)

    assert first == "interrupted SIGTERM True"
    assert listener.ask() == "heard nothing True"
    assert listener.quit() == 0


def test_a_signal_that_was_ignored_stays_ignored(listener: Listener) -> None:
    """As of nohup."""
    listener.send(signal.SIGHUP)

    assert listener.ask() == "heard nothing False"
    assert listener.quit() == 0


@pytest.mark.parametrize(
    ("argv", "reruns", "command"),
    [
        (["/env/bin/snakemake", "-j", "9"], False, "snakemake -j 9 --rerun-incomplete"),
        (["/env/snakemake/__main__.py", "a b"], True, "snakemake 'a b'"),
        (["./run.py", "--config", "a=$b"], True, "./run.py --config 'a=$b'"),
    ],
)
def test_the_same_command_goes_on(argv: list[str], reruns: bool, command: str) -> None:
    assert same_command(argv, reruns_incomplete=reruns) == command
