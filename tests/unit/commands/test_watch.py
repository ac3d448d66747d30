"""`shakedown watch`: what it refuses, Nagios' form, and processes of this machine to their end."""

import hashlib
import hmac
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.monitor.attach.once import PluginAnswer
from tests.slurm_fixtures import wait_for
from tests.tls import https_server, needs_openssl
from tests.watches import Watch
from tests.workflow.helpers import ROOT

RANKS = """
import os, sys, threading, time
def step():
    while True:
        print("step", flush=True)
        time.sleep(0.1)
def waits_for_the_others():
    threading.Event().wait()
print("ready", file=sys.stderr, flush=True)
step() if sys.argv[1] == "steps" else waits_for_the_others()
"""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--job or --match"),
        (["--job", "1", "--match", "x"], "--job or --match"),
        (["--job", "1;2"], "expected a Slurm job id"),
        (["--job", "1", "--hosts", "n1"], "--hosts goes with --match"),
        (["--match", "("], "no regular expression"),
        (["--match", "x", "--then", "scancel"], "needs a job"),
        (["--match", "x", "--hosts", "-x"], "--hosts"),
        (["--job", "1", "--command", "mail {jib}"], "did you mean 'job'"),
        (["--job", "1", "--command", "mail 'x"], "cannot be cut"),
        (["--job", "1", "--command", "sh -c 'mail {sentence}'"], "inside a text"),
        (["--job", "1", "--command", ""], "it is empty"),
        (["--job", "1", "--webhook", "http://h/"], "expected https"),
        (["--job", "1", "--webhook-secret", "s"], "needs --webhook"),
        (["--job", "1", "--interval", "0"], "expected a number from 1"),
    ],
)
def test_what_it_cannot_use_is_refused_and_is_unknown_to_nagios(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _code(["watch", *options]) == 2
    assert says in capsys.readouterr().err
    assert _code(["watch", "--once", *options]) == 3
    shown = capsys.readouterr()
    assert says in shown.out + shown.err


def _code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def test_the_line_for_nagios_has_one_bar_and_no_line_break() -> None:
    answer = PluginAnswer("CRITICAL", "rank 1 | \n\x1b[31mends", {"processes": 8, "seconds": 10.25})
    assert str(answer) == "WATCH CRITICAL - rank 1 ?[31mends | 'processes'=8 'seconds'=10.25"
    assert answer.code == 2


def test_without_slurm_a_job_could_not_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["watch", "--job", "1"]) == 3
    assert "scontrol is not installed on this host" in capsys.readouterr().err
    assert main(["watch", "--job", "1", "--once"]) == 3
    assert (
        "WATCH UNKNOWN - job 1: scontrol is not installed on this host" in capsys.readouterr().out
    )


class Ranks:
    """Processes with RANK, in a folder of their own whose name tells them apart."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, list[subprocess.Popen[str]]()
        (folder / "rank.py").write_text(RANKS)

    def start(self, *acts: str) -> None:
        world = {"WORLD_SIZE": str(len(acts)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for rank, act in enumerate(acts):
            with (self.folder / f"rank{rank}.log").open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, str(self.folder / "rank.py"), act],
                    env={**os.environ, **world, "RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            self.running.append(process)
            assert process.stderr is not None
            assert process.stderr.readline() == "ready\n"

    def watch(self, *options: str) -> Watch:
        own = ["--match", f"{self.folder}/rank", "--interval", "1"]
        return Watch(*own, "--out", str(self.folder / "out"), *options)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for process in made.running:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_stopped_rank_is_an_alarm_once_and_its_going_on_is_said(ranks: Ranks) -> None:
    log = ranks.folder / "watch.log"
    ranks.start("steps", "steps")
    with ranks.watch("--log", str(log), "--command", "echo {state} {ranks}") as watch:
        assert "2 ranks (0, 1 on" in watch.until("ranks")[0]
        ranks.running[1].send_signal(signal.SIGSTOP)
        lines = watch.until("ALARM")
        assert "suspect: trainer-rank1 on" in lines[-2]
        assert "rank 1 is stopped" in lines[-1]
        folder = Path(re.findall(r"evidence: (\S+)", lines[-1])[0])
        assert (folder / "diagnosis.html").is_file()
        assert "ended with 0: hung 1" in watch.until("command")[-1]
        ranks.running[1].send_signal(signal.SIGCONT)
        assert len(watch.until("moves again")) == 1
        for process in ranks.running:
            process.kill()
            process.wait()
        said = watch.until("ended: none of its 2 ranks is there any more")
        assert watch.code() == 0
    assert log.read_text().splitlines()[-1] == said[-1]


@needs_openssl
@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_webhook_with_a_bad_certificate_ends_no_watch_and_the_next_one_is_sent(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    secret.chmod(0o600)
    ranks.start("steps", "steps")
    with https_server(tmp_path) as server:
        options = ["--webhook", server.url, "--webhook-secret", str(secret)]
        with ranks.watch(*options) as watch:
            watch.until("2 ranks")
            ranks.running[1].send_signal(signal.SIGSTOP)
            refused = watch.until("webhook: ")[-1]
            ranks.running[1].send_signal(signal.SIGCONT)
            watch.until("moves again")
        monkeypatch.setenv("SSL_CERT_FILE", str(server.ca))
        with ranks.watch(*options) as watch:
            watch.until("2 ranks")
            ranks.running[0].send_signal(signal.SIGSTOP)
            assert "webhook: answered 204" in watch.until("webhook: ")[-1]

    assert "webhook: failed: the server's certificate is refused: unable to get" in refused
    ((headers, body),) = server.got
    assert json.loads(body)["ranks"] == [0]
    expected = hmac.new(b"key", body, hashlib.sha256).hexdigest()
    assert headers["X-Shakedown-Signature"] == f"sha256={expected}"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ranks_that_all_wait_are_suspect_and_one_that_is_killed_is_named(ranks: Ranks) -> None:
    ranks.start("waits", "waits")
    with ranks.watch("--patience", "2", "--stall", "4") as watch:
        assert "no process printed, read, wrote or computed" in watch.until("suspect")[-1]
        watch.until("evidence")
        ranks.running[1].kill()
        ranks.running[1].wait()
        assert "trainer-rank1" in watch.until("is gone, and the others are there")[-1]
        assert "rank 1" in watch.until("evidence")[-1]
        ranks.running[0].kill()
        ranks.running[0].wait()
        watch.until("ended")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_rank_of_torchrun_in_an_endless_loop_is_named(tmp_path: Path) -> None:
    trainer = ROOT / "tests" / "data" / "trainers" / "ddp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(trainer), "--steps", "1000000", "--out", str(tmp_path / "saved")]
    command += ["--cache", str(tmp_path / "cache")]
    log = tmp_path / "train.log"
    with log.open("w") as stream:
        job = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        wait_for(lambda: "step 3 " in log.read_text(), "the first steps")
        own = ["--match", f"{tmp_path}/saved", "--interval", "2", "--stall", "10"]
        with Watch(*own, "--out", str(tmp_path / "watch")) as watch:
            assert "2 ranks (0, 1 on" in watch.until("ranks")[0]
            (tmp_path / "cache" / "rank1.busy").touch()
            assert "processes compute, but none printed" in watch.until("suspect")[-1]
            assert "rank 1 is busy in host code (read_cache" in watch.until("ALARM hung")[-1]
    finally:
        job.terminate()
        job.wait()


@pytest.mark.slow
def test_once_tells_nagios_what_moves_what_hangs_and_what_is_not_there(ranks: Ranks) -> None:
    assert _once(ranks)[0] == 3
    ranks.start("steps", "steps")
    code, line = _once(ranks)
    assert (code, line.partition(" - ")[0]) == (0, "WATCH OK")
    assert "'processes'=2 'ranks'=2 'nodes'=1" in line
    ranks.running[1].send_signal(signal.SIGSTOP)
    code, line = _once(ranks)
    assert (code, line.partition(" - ")[0]) == (2, "WATCH CRITICAL")
    assert "rank 1 is stopped" in line


def _once(ranks: Ranks) -> tuple[int, str]:
    with ranks.watch("--once") as watch:
        (line,) = watch.until("WATCH")
        return watch.code(), line


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_watch_that_is_killed_leaves_no_sampler(ranks: Ranks) -> None:
    ranks.start("steps")
    with ranks.watch() as watch:
        watch.until("1 rank")
        (sampler,) = _children(watch.process.pid)
    wait_for(lambda: not Path(f"/proc/{sampler}").exists(), "the sampler's end")


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
