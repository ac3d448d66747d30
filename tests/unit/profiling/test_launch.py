"""Workers behind the launcher: real processes, torch's own profiler, and a stand-in for nsys."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shakedown.config import ProfileConfig
from shakedown.monitor.heartbeat import Heartbeat
from shakedown.profiling import profiles
from shakedown.profiling.capture import OPTIMIZER, VARIABLE, Capture, Order
from shakedown.profiling.launch import order_of
from shakedown.profiling.profiles import (
    SCRATCH,
    ProfileRecord,
    bring,
    finish,
    finish_here,
    lines,
    read_records,
)
from tests.command import shakedown
from tests.no_room import no_room
from tests.unit.profiling import fake_nsys

TRAINS = """
import sys, torch
model = torch.nn.Linear(16, 16)
policy, other = (kind(model.parameters()) for kind in (torch.optim.AdamW, torch.optim.SGD))
for step in range(1, 9):
    with torch.profiler.record_function(f"theirs {step}"):
        model(torch.randn(4, 16)).sum().backward()
        policy.step(), other.step(), policy.zero_grad()
sys.exit(int(sys.argv[1]))
"""
# A server that computes until it is told to end, as an engine's worker does.
SERVES = """
import signal, sys, time, torch
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
model = torch.nn.Linear(16, 16)
while True:
    model(torch.randn(4, 16))
    print("computed", flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "profiles"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the node keeps temporary files."""
    folder = tmp_path / "node-local"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nsys.put_on_path(tmp_path, monkeypatch)


def _order(target: Path, workers: str = "*", steps: str = "3:5", **changes: Any) -> Order:
    asked = ProfileConfig(workers=workers, steps=steps)
    made = order_of(asked, worker="dtensor_policy_worker", component="trainer", target=target)
    return replace(made, **changes)


def _launched(order: Order, *command: object, rank: int = 1) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "shakedown.profiling.launch", "--", *map(str, command)],
        env=os.environ | {VARIABLE: order.to_json(), "RANK": str(rank)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _record(target: Path) -> ProfileRecord:
    (record,), faults = read_records(target)
    assert not faults
    return record


def _annotations(trace: Path) -> list[str]:
    with gzip.open(trace, "rt", encoding="utf-8") as stream:
        events = json.load(stream)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


@pytest.mark.slow
def test_a_command_that_steps_an_optimizer_is_profiled_over_the_steps_and_ends_as_it_did(
    target: Path, scratch: Path
) -> None:
    options = ["--workers", "*", "--steps", "3:5", "--out", target]

    done = shakedown("debug", "nsys", *options, "--", sys.executable, "-c", TRAINS, "7")

    record = _record(target)
    (file,) = record.files
    marks = _annotations(target / record.host / file.name)
    assert done.returncode == 7, done.stderr
    assert "nsys is not on PATH" in done.stderr
    assert file.name.startswith("command_3:5_")
    assert (record.tool, file.first, file.last, record.said) == ("torch", 3, 4, [])
    assert [each for each in marks if each.startswith("step ")] == ["step 3", "step 4"]
    assert {each for each in marks if each.startswith("theirs")} == {"theirs 3", "theirs 4"}
    assert not list(scratch.glob(f"{SCRATCH}*"))
    assert str(target) in shakedown("debug", "nsys", target).stdout


@pytest.mark.slow
def test_the_first_step_of_a_command_begins_with_its_first_forward(
    target: Path, scratch: Path
) -> None:
    options = ["--workers", "*", "--steps", "1:2", "--out", target]

    done = shakedown("debug", "nsys", *options, "--", sys.executable, "-c", TRAINS, "0")

    record = _record(target)
    marks = _annotations(target / record.host / record.files[0].name)
    assert done.returncode == 0, done.stderr
    assert [each for each in marks if each.startswith("step ")] == ["step 1"]


@pytest.mark.slow
def test_of_a_commands_processes_those_with_a_matching_rank_are_profiled(
    target: Path, scratch: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS, encoding="utf-8")
    ranks = f"for rank in 0 1; do RANK=$rank {sys.executable} {script} 0 || exit 1; done"
    options = ["--workers", "command-rank1", "--steps", "2:3", "--out", target]

    done = shakedown("debug", "nsys", *options, "--", "sh", "-c", ranks)

    assert done.returncode == 0, done.stdout + done.stderr
    assert [(file.first, file.last) for file in _record(target).files] == [(2, 2)]


def test_an_own_sitecustomize_of_the_user_still_runs(
    target: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs ran')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    order = _order(target, steps_by=OPTIMIZER)

    output, _ = _launched(order, sys.executable, "-c", "print('ended')").communicate(timeout=60)

    assert output.splitlines()[-2:] == [
        "ended",
        "profile of trainer-rank1: no file: it ran none of the steps 3:5",
    ]
    assert "theirs ran" in output


@pytest.mark.slow
def test_a_server_is_profiled_for_the_steps_that_a_heartbeat_tells(
    target: Path, scratch: Path, tmp_path: Path
) -> None:
    beats = Heartbeat(tmp_path / "heartbeat", 0)
    order = _order(target, steps_by=str(beats.path), component="inference")
    process = _launched(order, sys.executable, "-c", SERVES)
    assert process.stdout is not None
    while "computed" not in process.stdout.readline():
        assert process.poll() is None

    for step in (2, 3, 4, 5):
        beats.beat(phase="train", step=step)
        time.sleep(1.0)
    # Before the end: what is whole is brought while the worker runs.
    deadline = time.monotonic() + 30
    while not _record(target).files:
        assert time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)

    record = _record(target)
    marks = _annotations(target / record.host / record.files[0].name)
    assert process.returncode == 0
    assert (record.files[0].first, record.files[0].last, record.ended) == (3, 4, True)
    assert [each for each in marks if each.startswith("step ")] == ["step 3", "step 4"]


def test_under_nsys_a_workers_report_is_brought_and_its_exit_code_kept(
    target: Path, scratch: Path, nsys: None
) -> None:
    order = _order(target, "*policy*")

    process = _launched(order, sys.executable, "-c", "import sys; sys.exit(5)")
    output, _ = process.communicate(timeout=60)

    record = _record(target)
    report = target / record.host / record.files[0].name
    assert process.returncode == 5
    told = (
        "Nsight profiling enabled for worker 'dtensor_policy_worker' (matched pattern '*policy*')"
    )
    assert told in output
    assert record.tool == "nsys"
    assert report.name.startswith("dtensor_policy_worker_3:5_")
    assert report.read_text(encoding="utf-8") == "recorded by the stand-in"
    assert not list(scratch.glob(f"{SCRATCH}*"))


@pytest.mark.slow
def test_a_process_without_a_gpu_says_that_nsys_sees_nothing_and_writes_a_chrome_trace(
    target: Path, scratch: Path, nsys: None
) -> None:
    order = _order(target, steps_by=OPTIMIZER)

    output, _ = _launched(order, sys.executable, "-c", TRAINS, 0).communicate(timeout=60)

    suffixes = sorted("".join(Path(file.name).suffixes) for file in _record(target).files)
    assert "this process has no GPU" in output
    assert suffixes == [".json.gz", ".nsys-rep"]


def test_cudas_profiler_is_started_and_stopped_around_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    capture = Capture(_order(tmp_path, scratch=str(tmp_path), nsys=True))

    for step in range(1, 8):
        capture.step(step)
    capture.close()

    assert calls == ["start", "step 3", "pop", "step 4", "synchronize", "pop", "stop"]


def test_a_worker_that_no_pattern_matches_takes_the_launchers_place(
    target: Path, scratch: Path, nsys: None
) -> None:
    order = _order(target, "*vllm*,trainer-rank0")
    code = f"import os; print(os.getpid(), {VARIABLE!r} in os.environ)"

    process = _launched(order, sys.executable, "-c", code)
    output, _ = process.communicate(timeout=60)

    assert output.split() == [str(process.pid), "False"]
    assert not target.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT], ids=lambda n: n.name)
def test_a_worker_that_a_signal_ends_is_told_by_the_same_signal(
    target: Path, scratch: Path, number: signal.Signals
) -> None:
    code = f"import os; os.kill(os.getpid(), {int(number)})"

    process = _launched(_order(target), sys.executable, "-c", code)
    process.communicate(timeout=60)

    assert process.returncode == -number
    assert _record(target).said == ["no file: it ran none of the steps 3:5"]


def test_what_a_killed_launcher_left_on_this_machine_is_brought_afterwards(
    target: Path, scratch: Path
) -> None:
    code = (
        f"import os, json, time; order = json.loads(os.environ[{VARIABLE!r}])\n"
        "open(order['scratch'] + '/late_3:5_1.nsys-rep', 'w').write('whole')\n"
        "print('written', flush=True)\ntime.sleep(60)\n"
    )
    process = _launched(_order(target), sys.executable, "-c", code)
    assert process.stdout is not None
    while "written" not in process.stdout.readline():
        assert process.poll() is None
    before = " ".join(lines(_record(target), target))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)

    finish_here(target)

    record = _record(target)
    assert "killed before its files were moved" in before
    assert str(scratch) in before
    assert record.ended
    assert (target / record.host / "late_3:5_1.nsys-rep").read_text(encoding="utf-8") == "whole"
    assert not list(scratch.glob(f"{SCRATCH}*"))


@pytest.fixture
def left(target: Path, tmp_path: Path) -> Iterator[ProfileRecord]:
    """A worker that has ended, and its report still on the node."""
    scratch = tmp_path / "shakedown-profile-1"
    scratch.mkdir()
    (scratch / "w_3:5_1.nsys-rep").write_text("x" * 5000, encoding="utf-8")
    target.mkdir()
    yield ProfileRecord("w", "trainer-rank0", "node1", 7, "nsys", "3:5", str(scratch))
    assert (scratch / "w_3:5_1.nsys-rep").stat().st_size == 5000


def _said(record: ProfileRecord, target: Path) -> str:
    assert not list(target.rglob("*.nsys-rep"))
    assert not list(target.rglob(".*"))
    (said,) = record.said
    assert said.startswith(f"w_3:5_1.nsys-rep was not moved, it is on node1 in {record.scratch}")
    return said


def test_a_report_that_is_too_large_stays_on_the_node_and_that_is_said(
    left: ProfileRecord, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "LARGEST", 4999)

    finish(left, target)

    assert "profile fewer steps" in _said(left, target)
    assert left.ended


def test_a_report_that_would_fill_the_file_system_stays_on_the_node(
    left: ProfileRecord, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "_SPARE", 1 << 60)

    finish(left, target)

    assert "not enough space: 4.9 KiB" in _said(left, target)


def test_a_disk_that_fills_while_a_report_is_copied_leaves_nothing_half_written(
    left: ProfileRecord, target: Path
) -> None:
    with no_room():
        bring(left, target)

    assert "File too large" in _said(left, target)  # EFBIG; a full disk's ENOSPC reads otherwise


def test_a_trace_that_cannot_be_written_whole_is_said_and_not_left_in_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    capture = Capture(_order(tmp_path, scratch=str(tmp_path)))
    for step in (3, 4):
        capture.step(step)
        torch.ones(4, 4).matmul(torch.ones(4, 4))

    with no_room():
        capture.close()

    assert "profile: OSError: the trace was cut off" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert not list(tmp_path.glob("*.json.gz"))
