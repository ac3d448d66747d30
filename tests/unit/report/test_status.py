"""`shakedown status` over a run whose jobs Slurm has: recorded squeue lines, real processes."""

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from shakedown import cli
from shakedown.core.files import write_json, write_text
from shakedown.core.lease import Holder
from shakedown.core.paths import RunPaths
from shakedown.inference.folder import ServerState
from shakedown.monitor.heartbeat import encode, host_name
from shakedown.monitor.workflow import WorkflowRun
from shakedown.processes.identity import Recorded
from shakedown.progress.signs import Beat

CONFIG = "run: demo\nstages:\n  sft: {algorithm: sft, steps: 40}\n"
MARK = "0123456789abcdef"
ROW = "{id}|{state}|{reason}|{nodes}|{start}|0|{name}|{comment}"


@dataclass
class Run:
    """A run's folder, its executor's journal and the squeue that it is told by."""

    paths: RunPaths
    jobs: Path
    programs: Path
    capsys: pytest.CaptureFixture[str]

    def submit(self, job_id: str, makes: str) -> None:
        identity = {"makes": [makes], "how": ""}
        event = {"event": "job", "token": job_id, "identity": identity, "job_id": job_id}
        self.note({**event, "name": f"job-{job_id}", "cluster": "", "log": "/log"})

    def note(self, event: Mapping[str, Any]) -> None:
        with (self.jobs / "1" / "journal.jsonl").open("a") as stream:
            stream.write(json.dumps(event) + "\n")

    def slurm_says(self, *rows: str, script: str = "cat") -> None:
        write_text(self.programs / "rows", "\n".join(rows) + "\n")
        program = self.programs / "squeue"
        program.write_text(f"#!/bin/sh\n{script} {self.programs}/rows\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def begun_by(self, process: WorkflowRun) -> None:
        replace(process, folder=str(self.paths.root.parent), jobs=str(self.jobs)).write(
            self.paths.workflow
        )

    def shown(self, *arguments: str) -> str:
        assert cli.main(["status", str(self.paths.root), *arguments]) == 0
        return self.capsys.readouterr().out


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    paths = RunPaths(tmp_path / "results" / "demo")
    write_text(paths.config, CONFIG)
    made = Run(paths, tmp_path / "jobs", tmp_path / "bin", capsys)
    write_text(made.jobs / "1" / "journal.jsonl", "")
    made.note({"event": "run", "place": {"path": str(tmp_path / "results")}})
    made.programs.mkdir()
    monkeypatch.setenv("PATH", f"{made.programs}:/usr/bin:/bin")
    sinfo = made.programs / "sinfo"
    sinfo.write_text("#!/bin/sh\n")
    sinfo.chmod(sinfo.stat().st_mode | stat.S_IXUSR)
    made.begun_by(WorkflowRun.here("jobs"))
    return made


def row(job_id: str, state: str, reason: str = "None", **more: str) -> str:
    words = {"nodes": "", "start": "N/A", "name": f"job-{job_id}", "comment": "(null)", **more}
    return ROW.format(id=job_id, state=state, reason=reason, **words)


def ended_process() -> Recorded:
    """One that has been on this machine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        return Recorded.of(process.pid)


def test_a_queued_stage_is_pending_with_slurms_reason_and_start(run: Run) -> None:
    start = datetime.fromtimestamp(int(time.time()) + 600)
    run.submit("11", "demo/preflight/verdict.json")
    run.slurm_says(row("11", "PENDING", "Resources", start=start.isoformat()))

    shown = run.shown()

    assert shown.startswith("demo: PENDING: Waiting in Slurm's queue: preflight\n")
    assert (
        "pending preflight    job 11 is PENDING, Resources: it waits for enough free nodes; "
        f"Slurm expects to start it at {start:%Y-%m-%d %H:%M} (in " in shown
    )
    assert "next: shakedown status" in shown
    assert "Not started" not in shown


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Priority", "jobs with higher priority are ahead of it"),
        ("JobHeldUser", "held until `scontrol release`"),
        ("PartitionNodeLimit", "it cannot start like this"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "UnavailableNodes:n1: a node that it needs is"),
        ("QOSMaxJobsPerUserLimit", "quality of service is reached; Slurm gives no start time"),
        ("SomethingNew", "PENDING, SomethingNew; Slurm gives no start time"),
    ],
)
def test_what_slurms_reason_means_is_said(run: Run, reason: str, said: str) -> None:
    run.submit("11", "demo/preflight/verdict.json")
    run.slurm_says(row("11", "PENDING", reason))

    assert said in run.shown()


def test_a_job_that_runs_is_told_with_its_nodes(run: Run) -> None:
    run.submit("12", "demo/stages/sft/outcome.json")
    run.slurm_says(row("12", "RUNNING", nodes="n[1-2]"))
    run.paths.stage("sft").new_attempt()

    assert "attempt 1 is starting; job 12 is RUNNING on n[1-2]" in run.shown()


def test_a_job_that_waits_outranks_the_result_of_the_one_before_it(run: Run) -> None:
    attempt = run.paths.stage("sft").new_attempt()
    outcome = {"stage": "sft", "attempt": 1, "state": "failed", "sentence": "broken"}
    write_json(attempt.outcome, outcome)
    run.submit("12", "demo/stages/sft/outcome.json")
    run.slurm_says(row("12", "PENDING", "Priority"))

    shown = run.shown()

    assert shown.startswith("demo: PENDING")
    assert "train pending, diagnose -, accept -" in shown


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("12", "NODE_FAIL", nodes="n2")], "its job 12 has ended: NODE_FAIL on n2"),
        ([], "Slurm no longer knows its job 12 (sacct -j 12)"),
        ([row("12", "RUNNING", name="another cluster's")], "Slurm no longer knows its job 12"),
    ],
)
def test_a_job_that_ended_without_a_result_blocks_at_once(
    run: Run, rows: Sequence[str], said: str
) -> None:
    run.paths.stage("sft").new_attempt()
    run.submit("12", "demo/stages/sft/outcome.json")
    run.slurm_says(*rows)

    shown = run.shown()

    assert shown.startswith("demo: UNKNOWN: sft was cut off")
    assert f"no result was written, and {said}" in shown


def test_a_job_whose_end_is_noted_is_not_asked_for(run: Run) -> None:
    run.submit("12", "demo/preflight/verdict.json")
    run.note({"event": "end", "token": "12", "outcome": "cancelled"})
    run.slurm_says(script="exit 1 #")

    shown = run.shown()

    assert "no result was written, and its job 12 was cancelled" in shown
    assert "note:" not in shown


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("", "squeue is not installed on this host"),
        ("echo no controller >&2; exit 1 #", "squeue: no controller"),
    ],
)
def test_without_an_answer_of_slurm_the_rest_is_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    run.submit("11", "demo/preflight/verdict.json")
    if script:
        run.slurm_says(script=script)
    else:
        monkeypatch.setenv("PATH", str(run.programs))

    shown = run.shown()

    assert f"note: Slurm could not be asked about job 11: {said}" in shown
    assert "pending preflight    submitted as job 11; its current state is unknown" in shown
    assert "  -       sft" in shown


def test_a_silent_slurm_costs_seconds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shakedown.report.jobs.GLANCE_SECONDS", 0.5)
    run.submit("11", "demo/preflight/verdict.json")
    run.slurm_says(script="exec sleep 60 #")

    began = time.monotonic()
    shown = run.shown()

    assert time.monotonic() - began < 20
    assert "squeue did not answer within 0.5 s" in shown


def test_jobs_whose_snakemake_was_killed_are_told_and_how_to_go_on(run: Run) -> None:
    dead = ended_process()
    run.begun_by(replace(WorkflowRun.here("jobs"), pid=dead.pid, ticks=dead.started))
    run.submit("11", "demo/preflight/verdict.json")
    run.slurm_says(row("11", "RUNNING", nodes="n1"))

    shown = run.shown()

    assert f"snakemake (process {dead.pid} on " in shown
    assert f"is gone but its jobs are not: 11; the same command in {run.paths.root.parent}" in shown


def test_between_two_stages_a_living_snakemake_is_at_work(run: Run) -> None:
    shown = run.shown()

    assert shown.startswith("demo: RUNNING: Running: the workflow")
    assert f"snakemake (process {os.getpid()} on " in shown


def test_a_server_whose_job_was_cancelled_is_gone_though_its_files_say_running(run: Run) -> None:
    folder = run.paths.server("policy")
    write_text(folder.job, "17\n")
    write_text(folder.job_mark, f"{MARK}\n")
    write_json(folder.endpoint, {"base_url": "http://127.0.0.1:1"})
    write_json(folder.state, asdict(ServerState("running", "n1", 4)))
    run.slurm_says(row("17", "CANCELLED", nodes="n1", comment=f"shakedown-{MARK}"))

    shown = run.shown()

    assert "WARN    serve        answered a real request at http://127.0.0.1:1" in shown
    assert "its job 17 has ended: CANCELLED on n1; steps that need it will restart it" in shown


def test_a_server_that_waits_in_the_queue_is_pending(run: Run) -> None:
    folder = run.paths.server("policy")
    write_text(folder.job, "17\n")
    write_text(folder.job_mark, f"{MARK}\n")
    run.slurm_says(row("17", "PENDING", "Resources", name=f"mine-{MARK}"))

    assert "pending serve        job 17 is PENDING, Resources" in run.shown()


def test_a_server_on_this_host_whose_process_is_gone_is_told(run: Run) -> None:
    folder, dead = run.paths.server("policy"), ended_process()
    node = WorkflowRun.here("").host
    write_json(folder.endpoint, {"base_url": "http://127.0.0.1:1"})
    write_json(folder.state, asdict(ServerState("running", node)))
    holder = replace(Holder.here("the daemon"), pid=dead.pid, started=dead.started)
    write_json(folder.daemon / ".lease" / "1", asdict(holder))

    shown = run.shown()

    assert f"its daemon is gone from {node}" in shown
    assert "not running" in shown


def test_an_attempt_whose_processes_are_gone_was_cut_off(run: Run) -> None:
    attempt, dead = run.paths.stage("sft").new_attempt(), ended_process()
    path = attempt.heartbeats / "trainer-rank0.beat"
    then = time.time() - 60
    path.write_bytes(encode(beat(dead.pid, then)))
    os.utime(path, (then, then))

    shown = run.shown()

    assert shown.startswith("demo: UNKNOWN: sft was cut off")
    assert f"trainer-rank0 is dead: process {dead.pid} is gone from {host_name()}" in shown


def test_a_silent_process_that_lives_is_not_called_dead(run: Run) -> None:
    attempt = run.paths.stage("sft").new_attempt()
    path = attempt.heartbeats / "trainer-rank0.beat"
    path.write_bytes(encode(beat(1, time.time() - 60)))  # init runs for longer than that

    shown = run.shown()

    assert "trainer-rank0  train, step 7, beat 1 min" in shown
    assert "dead" not in shown


def beat(pid: int, wall: float) -> Beat:
    return Beat("trainer", 0, pid, host_name(), "train", 7, 0, 0, 1, wall, 1.0)


def test_no_probe_asks_nobody(run: Run) -> None:
    run.submit("11", "demo/preflight/verdict.json")
    run.slurm_says(row("11", "RUNNING"), script=f"touch {run.programs}/asked; cat")

    shown = run.shown("--no-probe")

    assert "submitted as job 11" in shown
    assert not (run.programs / "asked").exists()


def test_programs_read_the_jobs_as_json(run: Run) -> None:
    run.submit("11", "demo/preflight/verdict.json")
    run.slurm_says(row("11", "PENDING", "Priority"))

    body = json.loads(run.shown("--json"))

    assert body["jobs"] == [
        {
            "step": "preflight",
            "job_id": "11",
            "outcome": None,
            "state": "PENDING",
            "reason": "Priority",
            "nodes": None,
            "start": None,
            "log": "/log",
        }
    ]
    assert body["state"] == "PENDING"


@pytest.mark.parametrize("body", ["", "[]", '{"schema": "shakedown/workflow/1"}', "\x00"])
def test_a_broken_record_of_the_workflow_is_a_note(run: Run, body: str) -> None:
    run.paths.workflow.write_text(body)

    shown = run.shown()

    assert "note: the run's Slurm jobs cannot be determined:" in shown
    assert shown.startswith("demo: NOT RUN: Not started")
