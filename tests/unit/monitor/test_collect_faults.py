"""The collector where things go wrong: odd processes and logs, a full disk, a py-spy that hangs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.core.errors import UsageError
from shakedown.diagnosis.read import evidence, read_paths
from shakedown.diagnosis.records import Stack
from shakedown.monitor.collect import (
    CollectReport,
    collect_local,
    from_pattern,
    from_pids,
    hooked,
    proc,
    pyspy,
)
from shakedown.monitor.collect import local as collecting
from shakedown.monitor.collect import writer as writing
from shakedown.monitor.collect.bounded import run_bounded
from shakedown.monitor.collect.logs import LOG_BYTES, copy_ends, logs_in
from shakedown.monitor.collect.writer import Writer, printable
from shakedown.slurm.records import check_job_id

# A rank with the hook: it sleeps, or works when it gets a line; its forked worker sleeps.
HOOKED = """
import os, sys, time
from pathlib import Path
from shakedown.monitor import hook
def waits_here():
    print("ready", flush=True)
    sys.stdin.readline()
def works_here():
    print("works", flush=True)
    while True:
        pass
hook.install(7, Path(sys.argv[1]))
if sys.argv[2:]:
    worker = os.fork()
    if not worker:
        time.sleep(600)
    print(worker, flush=True)
waits_here()
works_here()
"""


class Rank:
    """A hooked process whose evidence is in `folder`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.evidence = folder / "evidence"
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOOKED, str(self.evidence), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.worker = int(self.line()) if arguments else 0
        assert self.line() == "ready\n"
        while proc.read_state(self.process.pid).state != "S":  # it said so before it waits
            time.sleep(0.01)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rank]:
    made = Rank(tmp_path_factory.mktemp("rank"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process.pid
    process.kill()
    process.wait()


def collected_once(code: str, folder: Path, *arguments: str) -> CollectReport:
    """One sample of a process whose evidence is in `folder`, once it says that it is ready."""
    command = [sys.executable, "-c", code, str(folder / "evidence"), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(500):  # it said so before it sleeps
            if proc.read_state(process.pid).state == "S":
                break
            time.sleep(0.01)
        return collect_local(from_pids([process.pid]), folder / "out", rounds=1)
    finally:
        process.kill()
        process.communicate()


def mains(out: Path) -> list[str]:
    stacks = [row for row in read_paths([out]).records if isinstance(row, Stack)]
    return [s.main.frames[-1].function for s in stacks if s.main]


def test_hooked_process_gives_its_stacks_without_pyspy_wherever_they_go(
    rank: Rank, tmp_path: Path
) -> None:
    targets = from_pids([rank.process.pid])
    report = collect_local(targets, tmp_path, gap=0.0)
    names = [f"round{n}/faulthandler-trainer-rank7.txt" for n in (1, 2)]
    assert [(row.rank, row.sources, row.missed) for row in report.targets] == [(7, names, [])]
    assert mains(tmp_path) == ["waits_here", "waits_here"]
    assert report.seconds < hooked.HOOK_SECONDS  # without torch there is no recorder to wait for


def test_dumps_in_the_evidence_folder_itself_are_not_read_twice(rank: Rank) -> None:
    raw = rank.evidence / "faulthandler-trainer-rank7.txt"
    os.truncate(raw, 0)
    collect_local(from_pids([rank.process.pid]), rank.evidence, rounds=1)
    assert raw.read_text() == ""
    assert mains(rank.evidence) == ["waits_here"]


def test_earlier_dumps_of_the_hook_are_kept(rank: Rank, tmp_path: Path) -> None:
    raw = rank.evidence / "faulthandler-trainer-rank7.txt"
    with raw.open("a") as stream:
        stream.write("asked for by hand\n")
    collect_local(from_pids([rank.process.pid]), rank.evidence, rounds=1)
    assert raw.read_text().startswith("asked for by hand\n")
    copied = rank.evidence / "round1/faulthandler-trainer-rank7.txt"
    assert "by hand" not in copied.read_text()
    os.truncate(raw, 0)


def test_pyspy_reads_a_hooked_process_when_asked(rank: Rank, tmp_path: Path) -> None:
    pids = from_pids([rank.process.pid])
    report = collect_local(pids, tmp_path, rounds=1, always_pyspy=True)
    assert [name.partition("-")[0] for name in report.targets[0].sources] == [
        "round1/faulthandler",
        "round1/pyspy",
    ]


def test_process_whose_open_files_are_hidden_is_known_by_its_file(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hooked.find(rank.process.pid)
    assert found is not None
    monkeypatch.setattr(proc, "visible", lambda _pid: False)
    hidden = hooked.find_by_file(rank.process.pid, "trainer-rank7", rank.evidence)
    assert hidden is not None
    assert (hidden.rank, hidden.evidence) == (7, found.evidence)
    dumps, lost = hooked.Stacks([hidden]).dump([rank.process.pid])
    assert b"waits_here" in dumps[rank.process.pid]
    assert lost == {}
    assert hooked.find_by_file(rank.process.pid, "trainer-rank8", rank.evidence) is None
    assert hooked.find_by_file(rank.process.pid, "../x-rank7", tmp_path) is None


def test_process_that_works_and_its_worker_are_read_by_pyspy(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "worker")
    try:
        assert hooked.find(rank.worker) is None  # it holds its parent's file, and is not signalled
        (tmp_path / "asleep").mkdir()
        report = collect_local(from_pids([rank.process.pid]), tmp_path / "asleep", rounds=1)
        with_worker = (tmp_path / "asleep/round1/pyspy-trainer-rank7.txt").read_text()
        assert f"Process {rank.worker}" in with_worker
        assert rank.process.stdin is not None
        rank.process.stdin.write("\n")
        rank.process.stdin.flush()
        assert rank.line() == "works\n"
        report = collect_local(from_pids([rank.process.pid]), tmp_path / "busy", rounds=1)
        assert report.targets[0].states[0]["state"] == "R"
        (active,) = (
            s.main.active
            for s in read_paths([tmp_path / "busy/round1/pyspy-trainer-rank7.json"]).records
            if isinstance(s, Stack) and s.main
        )
        assert active
    finally:
        rank.end()


def test_process_whose_dump_is_cut_at_a_hundred_frames_is_read_from_outside(
    tmp_path: Path,
) -> None:
    code = HOOKED.replace("waits_here()\nworks", "(lambda f: f(f, 150))(DEEP)\nworks").replace(
        "import os", "DEEP = lambda f, n: f(f, n - 1) if n else waits_here()\nimport os", 1
    )
    (row,) = collected_once(code, tmp_path).targets
    (source,) = row.sources  # py-spy's, where it does not sleep again yet
    assert source in ("round1/stacks-trainer-rank7.json", "round1/pyspy-trainer-rank7.json")


RECORDER = """
import sys, threading, time
from pathlib import Path
from shakedown.monitor import hook
def dump(evidence, name):
    if sys.argv[2:]:
        time.sleep(600)
    (evidence / f"fr-{name}.json").write_text("{}")
    (evidence / f"fr-{name}.pickle").write_bytes(b"recorded")
evidence = Path(sys.argv[1])
hook.install(7, evidence)
hook.dump_flight_recorder = dump
threading.Thread(target=hook._answer, args=(evidence, "trainer-rank7"), daemon=True).start()
while hook.THREAD_NAME not in [p.read_text()[:-1] for p in Path("/proc/self/task").glob("*/comm")]:
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("silent", [False, True], ids=["answers", "silent"])
def test_recorder_is_copied_and_a_silent_rank_is_read_from_outside(
    silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooked, "HOOK_SECONDS", 1.0 if silent else 60.0)
    (row,) = collected_once(RECORDER, tmp_path, *(["silent"] if silent else [])).targets
    if silent:
        assert row.missed == ["flight recorder: the process did not answer the request"]
        assert row.sources[-1] == "round1/pyspy-trainer-rank7.json"
    else:
        assert row.missed == []
        assert row.sources[0] == "round1/faulthandler-trainer-rank7.txt"
        assert (tmp_path / "out/fr-trainer-rank7.pickle").read_bytes() == b"recorded"


@pytest.fixture
def hanging_pyspy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho $$ >> $(dirname $0)/pids\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(pyspy, "find_pyspy", lambda: str(program))
    return tmp_path / "pids"


def ended(pids: Path) -> bool:
    """Wait until none of the processes runs."""
    deadline = time.monotonic() + 20
    while any(proc.read_state(int(pid)).alive for pid in pids.read_text().split()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("which", ["process", "node"])
def test_pyspy_that_hangs_is_ended_at_the_limit(
    which: str, hanging_pyspy: Path, sleeper: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"process": (0.5, 90.0), "node": (90.0, 1.0)}
    monkeypatch.setattr(pyspy, "PYSPY_SECONDS", limits[which][0])
    monkeypatch.setattr(collecting, "NODE_SECONDS", limits[which][1])
    targets = from_pids([sleeper])
    report = collect_local(targets, tmp_path / "out", rounds=1, always_pyspy=True)
    assert "py-spy did not answer within" in report.targets[0].missed[0]
    assert report.written
    assert ended(hanging_pyspy)


def test_call_that_never_returns_does_not_hold_the_others() -> None:
    never = threading.Event()

    def fails() -> int:
        raise ValueError("bad")

    results = run_bounded([lambda: int(never.wait()), lambda: 5, fails], 2, 1.0)
    never.set()
    assert results[:2] == [None, 5]
    assert str(results[2]) == "bad"


def test_logs_that_are_no_files_are_named_and_never_waited_for(tmp_path: Path) -> None:
    logs, out = tmp_path / "logs", Writer(tmp_path / "out")
    logs.mkdir()
    os.mkfifo(logs / "pipe.log")
    (logs / "zeros.log").symlink_to("/dev/zero")
    (logs / "gone.log").symlink_to("nowhere")
    (logs / "folder.log").mkdir()  # looked into, and empty
    with (logs / "long.err").open("wb") as stream:
        stream.truncate(2**33)  # takes no room
        stream.seek(0, os.SEEK_END)
        stream.write(b"the end")
    (logs / "slurm-1234.out").write_text("a job's output")
    (logs / os.fsdecode(b"\xff\n.log")).write_text("bytes")
    copy_ends(logs_in(logs), out)
    copied = tmp_path / "out/logs"
    assert (copied / "long.err").stat().st_size == LOG_BYTES
    assert (copied / "long.err").read_bytes().endswith(b"the end")
    assert (copied / "slurm-1234-output.out").is_file()  # a number at the end would be a rank
    assert len(list(copied.iterdir())) == 3
    assert [text.partition(":")[0] for text in out.summary()] == [
        f"log {name}.log" for name in ("gone", "pipe", "zeros")
    ]


def test_full_disk_is_told_once_with_the_number_of_files(sleeper: int, tmp_path: Path) -> None:
    collect = f"{sys.executable} -m shakedown.cli hang collect --rounds 1 --pid {sleeper}"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 0; exec {collect} --out {tmp_path / 'out'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "hang collect: UNKNOWN: 0 of 1 processes read" in done.stdout
    assert "2 files not written: File too large" in done.stdout
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_folder_of_any_name_is_printed_safely(
    sleeper: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = os.path.join(tmp_path, os.fsdecode(b"\xff\x1b[31m\nx"))
    assert main(["hang", "collect", "--pid", str(sleeper), "--rounds", "1", "--out", out]) == 0
    assert r"\xff\x1b[31m\nx" in capsys.readouterr().out
    assert printable("rank ü") == "rank ü"


def test_nothing_found_is_written_down_and_exits_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--match", "no process is called so", "--out", str(tmp_path), "--rounds", "1"]
    assert main(["hang", "collect", *arguments]) == 0
    assert "no process was found" in capsys.readouterr().out
    (table,) = tmp_path.glob("collected-*.json")
    assert json.loads(table.read_text())["missed"][0] == "no process was found"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pid", "0"],
        ["--pid", "-1"],
        ["--pid", "99999999999"],
        ["--pid", "1", "--gap", "nan"],
        ["--pid", "1", "--gap", "inf"],
        ["--pid", "1", "--rounds", "101"],
        ["--pid", "1", "--this-node"],
        ["--job", "1; rm -r /"],
        ["--job", "1", "--match", "x"],
        ["--pid", "1", "--hosts", "n1"],
        ["--job", "1", "--hosts", "n1"],
        ["--hosts", "n1"],
        ["--match", "x", "--hosts", "n1", "--out", "-"],
    ],
)
def test_arguments_that_mean_nothing_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    assert main(["hang", "collect", "--out", str(tmp_path), *arguments]) == 2
    assert not list(tmp_path.iterdir())


def named(environments: list[dict[str, str]], mark: str) -> list[tuple[str, int | None]]:
    """Names of sleeping Python processes, found by pattern below a shell of the same words."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k != "RANK"}
    code = "import sys, time; print(flush=True); time.sleep(600)"
    processes = [
        subprocess.Popen(
            ["sh", "-c", f"{sys.executable} -c '{code}' {mark}; true"],
            env={**clean, **environment},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for environment in environments
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        targets = from_pattern(mark)
        assert all(proc.is_python(t.pid) for t in targets)
        pids = [t.pid for t in targets]
        return [(t.name.replace(str(t.pid), "N"), t.rank) for t in sorted(from_pids(pids), key=str)]
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_rank_is_that_of_the_launcher_and_of_slurm_only_in_a_step() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}
    step = {**batch, "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
    assert named([batch, step], "slurm-and-no-launcher") == [("pidN", None), ("trainer-rank1", 1)]
    launched = [step, {**step, "RANK": "0"}, {**step, "RANK": "x"}]
    assert named(launched, "below-a-launcher") == [
        ("pidN", None),
        ("pidN", None),
        ("trainer-rank0", 0),
    ]


@pytest.mark.parametrize("own", [{"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, {"RANK": "1"}])
def test_launcher_whose_ranks_are_gone_is_none_of_them(tmp_path: Path, own: dict[str, str]) -> None:
    program = tmp_path / "torch" / "distributed" / "run.py"
    program.parent.mkdir(parents=True)
    for package in (program.parent, program.parent.parent):
        (package / "__init__.py").touch()
    program.write_text("import time; print(flush=True); time.sleep(600)")
    with subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "alone"],
        cwd=tmp_path,
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = [target.rank for target in from_pids([process.pid])]
        process.kill()
    assert found == [None]


def test_rank_that_two_processes_claim_is_given_to_none() -> None:
    assert named([{"RANK": "3"}, {"RANK": "3"}], "two-jobs-of-one-user") == [("pidN", None)] * 2


def test_worker_of_a_rank_is_read_with_it_and_is_no_target() -> None:
    mark = "a-rank-and-its-worker"
    code = "import os,sys,time; os.fork() or time.sleep(600); print(flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, mark],
        env={**os.environ, "RANK": "4"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert [(t.pid, t.rank) for t in from_pattern(mark)] == [(process.pid, 4)]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_job_without_slurm_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "out"
    assert main(["hang", "collect", "--job", "12_3", "--out", str(out)]) == 0
    said = "scontrol is not installed on this host"
    assert said in capsys.readouterr().out
    body = json.loads((out / "collected-job.json").read_text())
    assert (body["nodes"], body["missed"]) == (
        {},
        [f"slurm: {said}"],
    )


def test_job_id_is_checked_before_slurm_sees_it() -> None:
    assert check_job_id("1234+1") == "1234+1"
    with pytest.raises(UsageError, match="Slurm job id"):
        check_job_id("--help")


def test_schemas_are_those_that_analyze_reads() -> None:
    assert (writing.BEATS, writing.COLLECTED) == (evidence.BEATS, evidence.COLLECTED)
