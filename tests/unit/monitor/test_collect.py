"""The collector on real processes: running, stopped, gone, foreign; and the hook that answers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.core.errors import UsageError
from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.records import Stack
from shakedown.monitor import hook
from shakedown.monitor.collect import Target, collect_local, from_attempt, from_pattern, from_pids
from shakedown.monitor.collect.proc import catches, read_state
from shakedown.monitor.heartbeat import Heartbeat

SLEEPER = """
import subprocess, sys, time
def waits_here():
    print("ready", flush=True)
    time.sleep(600)
waits_here()
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", flush=True)
time.sleep(600)
"""
HOOKED = """
import sys, time
from pathlib import Path
from shakedown.monitor import hook
def waits_here():
    hook.install(0, Path(sys.argv[1]))
    print("ready", flush=True)
    time.sleep(600)
waits_here()
"""
ABORTS = """
import ctypes, os, sys, threading, time
from pathlib import Path
import torch.distributed
from shakedown.monitor import hook
def waits_here():
    hook.install(0, Path(sys.argv[1]))
    print("ready", flush=True)
    # After a second the evidence thread has seen the folder, and this thread sleeps: faulthandler
    # reads the frames of threads that run meanwhile, which can end it by SIGSEGV.
    threading.Timer(1.0, ctypes.CDLL(None).abort).start()
    time.sleep(600)
waits_here()
"""


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    while read_state(process.pid).state != "S":  # it said so before it sleeps
        time.sleep(0.01)
    return process


def end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    process = start(SLEEPER, RANK="5")
    yield process
    end(process)


def paths_of(out: Path) -> list[str]:
    stacks = [r for r in read_paths([out]).records if isinstance(r, Stack) and r.main]
    return [frame.function for s in stacks if s.main for frame in s.main.frames]


def test_running_process_is_sampled_in_every_round(
    sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    report = collect_local([Target("trainer-rank5", sleeper.pid, "trainer", 5)], tmp_path, gap=0.1)
    assert report.targets[0].missed == []  # asleep, so nobody paused it
    names = [f"round{n}/pyspy-trainer-rank5.json" for n in (1, 2)]
    assert report.targets[0].sources == names
    assert paths_of(tmp_path).count("waits_here") == 2
    states = [state["state"] for state in report.targets[0].states]
    assert states == ["S", "S"]


def test_stopped_process_is_read_without_pausing_it(
    sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    while read_state(sleeper.pid).state != "T":
        time.sleep(0.01)
    report = collect_local([Target("trainer-rank5", sleeper.pid, "trainer", 5)], tmp_path, rounds=1)
    assert report.targets[0].states[0]["state"] == "T"
    assert "waits_here" in paths_of(tmp_path)


def test_gone_process_is_written_down_and_the_others_are_read(
    sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    targets = [Target("trainer-rank0", gone.pid, "trainer", 0)]
    targets.append(Target("trainer-rank5", sleeper.pid, "trainer", 5))
    report = collect_local(targets, tmp_path, rounds=1)
    assert report.targets[0].missed == ["round 1: the process is gone"]
    assert report.targets[1].missed == []
    (table,) = tmp_path.glob("collected-*.json")
    body = json.loads(table.read_text())
    assert [row["states"][0]["state"] for row in body["targets"]] == ["X", "S"]


def test_process_that_is_no_python_is_missed_with_a_reason(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        report = collect_local([Target("server", process.pid, "inference")], tmp_path, rounds=1)
    finally:
        process.kill()
        process.wait()
    assert "py-spy" in report.targets[0].missed[0]
    assert list(tmp_path.glob("round1/*.error.txt"))


def test_children_are_in_the_text_form(tmp_path: Path) -> None:
    process = start(PARENT)
    try:
        collect_local([Target("trainer-rank0", process.pid, "trainer", 0)], tmp_path, rounds=1)
    finally:
        end(process)
    text = (tmp_path / "round1/pyspy-trainer-rank0.txt").read_text()
    assert f"Parent Process {process.pid}" in text


def test_hooked_process_writes_its_stacks_on_the_signal(tmp_path: Path) -> None:
    process = start(HOOKED, str(tmp_path))
    try:
        assert catches(process.pid, signal.SIGUSR1)
        os.kill(process.pid, signal.SIGUSR1)
        written = tmp_path / "faulthandler-trainer-rank0.txt"
        while "waits_here" not in written.read_text():
            time.sleep(0.05)
        assert process.poll() is None
    finally:
        end(process)


def test_process_that_aborts_writes_its_stacks_and_asks_all_ranks_for_their_dumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")  # it need not wait for others
    process = start(ABORTS, str(tmp_path))
    code = process.wait(timeout=60)
    assert process.stdout is not None
    process.stdout.close()
    stacks = (tmp_path / "faulthandler-trainer-rank0.txt").read_text()
    assert code == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in stacks
    assert "waits_here" in stacks
    assert (tmp_path / "REQUEST").is_file()
    assert (tmp_path / "fr-trainer-rank0.json").is_file()
    assert (tmp_path / "fr-trainer-rank0.pickle").is_file()


def test_process_that_aborts_waits_for_dumps_of_all_ranks_since_it_asked(tmp_path: Path) -> None:
    name = "trainer-rank0"
    assert not hook.all_have_written(tmp_path, name, "1")
    for rank in (0, 1):
        (tmp_path / f"fr-trainer-rank{rank}.pickle").touch()
        os.utime(tmp_path / f"fr-trainer-rank{rank}.pickle", (1, 1))
    hook.request(tmp_path)
    assert not hook.all_have_written(tmp_path, name, "2")
    (tmp_path / "fr-trainer-rank0.pickle").touch()
    assert hook.all_have_written(tmp_path, name, "1")
    assert not hook.all_have_written(tmp_path, name, "2")
    (tmp_path / "fr-orchestrator-rank0.pickle").touch()
    assert not hook.all_have_written(tmp_path, name, "2")
    (tmp_path / "fr-trainer-rank1.pickle").touch()
    assert hook.all_have_written(tmp_path, name, "2")
    assert not hook.all_have_written(tmp_path, name, "")


def test_dump_of_a_rank_that_an_exception_ends_leaves_an_earlier_one_alone(tmp_path: Path) -> None:
    hook.leave_dump(1, tmp_path)
    written = (tmp_path / "fr-trainer-rank1.json").read_bytes()
    (tmp_path / "fr-trainer-rank2.json").write_text("while it stood")

    hook.leave_dump(2, tmp_path)
    hook.leave_dump(3, tmp_path / "missing")

    assert b"version" in written
    assert (tmp_path / "fr-trainer-rank2.json").read_text() == "while it stood"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "fr-trainer-rank1.json",
        "fr-trainer-rank2.json",
    ]


def test_process_without_the_hook_is_never_signalled(
    sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "faulthandler-trainer-rank5.txt").touch()
    assert not catches(sleeper.pid, signal.SIGUSR1)
    os.kill(sleeper.pid, signal.SIGSTOP)  # it cannot answer: the collector does not wait for it
    while read_state(sleeper.pid).state != "T":
        time.sleep(0.01)
    collect_local([Target("trainer-rank5", sleeper.pid, "trainer", 5)], tmp_path, rounds=1)
    assert sleeper.poll() is None


def test_ends_of_the_logs_and_heartbeats_are_copied(
    sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    logs, out = tmp_path / "logs", tmp_path / "evidence"
    logs.mkdir()
    (logs / "trainer-rank5.log").write_bytes(b"x" * 300_000 + b"the end")
    Heartbeat(tmp_path / "heartbeat", 5).beat(phase="train", step=4)
    collect_local([Target("trainer-rank5", sleeper.pid)], out, logs=logs, rounds=1)
    copied = (out / "logs/trainer-rank5.log").read_bytes()
    assert copied.endswith(b"the end")
    assert len(copied) == 256 * 1024
    beats = out / f"round1/beats-{socket.gethostname()}.json"
    assert json.loads(beats.read_text())["beats"][0]["step"] == 4


def test_folder_that_cannot_be_written_is_reported_and_never_raised(
    sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    report = collect_local([Target("a", sleeper.pid)], tmp_path / "file" / "out", rounds=1)
    assert report.missed
    assert report.files == []


def test_name_of_a_target_cannot_leave_the_folder(
    sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    collect_local([Target("../../evil", sleeper.pid)], tmp_path / "out", rounds=1)
    assert not list(tmp_path.glob("*evil*"))
    assert list((tmp_path / "out" / "round1").glob("*evil*"))


def test_targets_by_pid_take_the_rank_of_the_process(sleeper: subprocess.Popen[str]) -> None:
    (target,) = from_pids([sleeper.pid])
    assert (target.name, target.rank) == ("trainer-rank5", 5)


def test_targets_by_pattern_leave_out_this_process(sleeper: subprocess.Popen[str]) -> None:
    pids = [target.pid for target in from_pattern(r"def waits_here")]
    assert sleeper.pid in pids
    assert os.getpid() not in pids
    with pytest.raises(UsageError, match="regular expression"):
        from_pattern("(")


def test_targets_of_an_attempt_are_those_of_this_host(tmp_path: Path) -> None:
    beats = Heartbeat(tmp_path / "heartbeat", 1, "orchestrator")
    beats.beat(phase="data")
    beats.close()
    (target,) = from_attempt(tmp_path)
    assert (target.name, target.pid) == ("orchestrator-rank1", os.getpid())
    with pytest.raises(UsageError, match="no heartbeats"):
        from_attempt(tmp_path / "heartbeat")


def test_collect_command_writes_what_analyze_reads(
    sleeper: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--pid", str(sleeper.pid), "--out", str(out), "--rounds", "1"]
    assert main(["hang", "collect", *arguments]) == 0
    assert f"read on {socket.gethostname()}" in capsys.readouterr().out
    assert paths_of(out).count("waits_here") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["--pid", "1", "--match", "x"], ["--pid", "1", "--rounds", "0"]]
)
def test_collect_command_refuses_unclear_arguments(tmp_path: Path, arguments: list[str]) -> None:
    assert main(["hang", "collect", "--out", str(tmp_path), *arguments]) == 2


def test_what_a_process_and_its_children_do_is_counted(tmp_path: Path) -> None:
    out = tmp_path / "out.log"
    work = "import time\nend = time.time() + 0.5\nwhile time.time() < end: pass\n"
    program = (
        "import subprocess, sys\nsys.stdin.readline()\n"
        f"subprocess.run([sys.executable, '-c', {work!r}])\n"
        "child = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "print('x' * 99, flush=True)\nsys.stdin.readline()\nchild.kill()\n"
    )
    with out.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=stream
        )
    assert process.stdin is not None
    while read_state(process.pid).state != "S":
        time.sleep(0.01)
    first = read_state(process.pid).activity
    process.stdin.write(b"go\n")
    process.stdin.flush()
    while out.stat().st_size < 100:
        time.sleep(0.01)
    # Half a second of work of the child that has ended, and some of the one that runs.
    deadline = time.monotonic() + 20
    last = read_state(process.pid).activity
    while (last is None or last.cpu < 0.15) and time.monotonic() < deadline:
        time.sleep(0.05)
        last = read_state(process.pid).activity
    process.communicate(b"end\n")

    assert first is not None
    assert last is not None
    assert last.at > first.at
    assert last.cpu - first.cpu > 0.1
    assert last.io > first.io
    assert last.output - first.output == 100


def test_files_that_processes_print_to_are_copied_by_their_owner(tmp_path: Path) -> None:
    own, shared, out = tmp_path / "stdout", tmp_path / "all.txt", tmp_path / "evidence"
    program = [sys.executable, "-c", "print('hello', flush=True); import time; time.sleep(60)"]
    with own.open("wb") as first, shared.open("wb") as both:
        processes = [
            subprocess.Popen(program, stdout=first, stderr=both),
            subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=both),
        ]
    while not own.stat().st_size:
        time.sleep(0.01)
    shared.write_text("of both\n")

    try:
        targets = [Target(f"trainer-rank{r}", p.pid) for r, p in enumerate(processes)]
        collect_local(targets, out, rounds=1)
    finally:
        for process in processes:
            process.kill()
            process.wait()

    found = {path.name: path.read_text() for path in (out / "logs").iterdir()}
    assert found == {"trainer-rank0.out": "hello\n", "output.log": "of both\n"}


def test_logs_of_torchrun_keep_their_folders(
    tmp_path: Path, sleeper: subprocess.Popen[str]
) -> None:
    logs, out = tmp_path / "logs", tmp_path / "evidence"
    inner = logs / "run_x" / "attempt_0" / "3"
    inner.mkdir(parents=True)
    (inner / "stderr.log").write_text("ValueError: bad\n")

    collect_local([Target("trainer-rank3", sleeper.pid)], out, logs=logs, rounds=1)

    assert (out / "logs/run_x/attempt_0/3/stderr.log").read_text() == "ValueError: bad\n"


def test_rank_of_this_node_without_a_process_is_found_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = f"shakedown-absent-{os.getpid()}"
    ranks = [
        start(
            SLEEPER, mark, RANK=str(4 + local), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE="3",
            WORLD_SIZE="8", MASTER_ADDR="n1", MASTER_PORT=mark,
        )
        for local in (0, 2)
    ]  # fmt: skip
    try:
        done = main(["hang", "collect", "--match", mark, "--out", str(tmp_path), "--rounds", "1"])
    finally:
        for process in ranks:
            end(process)

    capfd.readouterr()
    chosen = diagnose_paths([tmp_path]).extra["diagnosis"]
    assert done == 0
    assert (chosen["cause"], chosen["culprits"]["ranks"]) == ("missing_rank", [5])
