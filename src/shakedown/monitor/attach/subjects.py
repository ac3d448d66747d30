"""Subjects of a watch: a Slurm job, or processes by command line, here or on hosts by ssh."""

import os
import pwd
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from shakedown.core.errors import UsageError
from shakedown.monitor.attach.samplers import Start
from shakedown.monitor.collect import proc
from shakedown.monitor.collect.hosts import ssh_argv
from shakedown.monitor.collect.steps import COLLECTOR
from shakedown.slurm.client import environment, srun_argv
from shakedown.slurm.hostlist import node_name
from shakedown.slurm.jobs import Job
from shakedown.slurm.records import StepNodes, describe, parts_of

# -P: a `queue.py` in the working directory must not shadow Python's own.
_SAMPLER = ("-P", "-m", "shakedown.monitor.attach.sampler")


@dataclass(frozen=True)
class JobPhase:
    """Whether there is something to look at. `says`: in Slurm's words; `good`: it ended well."""

    state: Literal["runs", "waits", "over", "unknown"]
    says: str = ""
    good: bool = False


class Subject(Protocol):
    """The interface of a subject of the watch."""

    @property
    def label(self) -> str: ...

    @property
    def job_id(self) -> str:
        """The job's id; empty where there is no Slurm job."""
        ...

    def phase(self) -> JobPhase:
        """Ask Slurm if there is a job."""
        ...

    def starts(self, idle: float) -> list[Start]:
        """Programs that sample it; they end when nobody asks them for `idle` seconds."""
        ...

    def collect(self, out: Path, rounds: int, gap: float) -> list[str]:
        """The command that collects its evidence to `out`, `rounds` times, `gap` seconds apart."""
        ...

    def missing(self) -> str:
        """Why nothing may be found, such as another user's job; empty where it is not known."""
        ...


@dataclass
class SlurmJob:
    """A job of this user. The other fields are known once Slurm was asked."""

    given: str
    parts: list[StepNodes] = field(default_factory=list)
    job_id: str = ""
    owner: str = ""

    @property
    def label(self) -> str:
        return f"job {self.given}"

    def phase(self) -> JobPhase:
        described, text, lost = describe(self.given)
        state = described.get("JobState", "")
        if not state:
            return JobPhase("unknown", lost or "Slurm does not know the job")
        # An array task such as 1234_5 has a job id of its own, its processes' SLURM_JOB_ID.
        self.job_id = described.get("JobId", self.given)
        self.owner = described.get("UserId", "").partition("(")[0]  # root(0)
        job = Job(state)
        if job.ended:
            code = described.get("ExitCode", "")
            return JobPhase("over", f"{state} (exit code {code})", state == "COMPLETED")
        if job.takes_steps:
            try:
                self.parts = parts_of(text)
            except UsageError:
                return JobPhase("unknown", f"no list of its nodes: {described.get('NodeList')!r}")
            return JobPhase("runs")
        # PENDING after a requeue, SUSPENDED while another one has its turn.
        return JobPhase("waits", state)

    def starts(self, idle: float) -> list[Start]:
        return [self._start(part, idle) for part in self.parts]

    def _start(self, part: StepNodes, idle: float) -> Start:
        nodes = part.nodes
        srun = srun_argv(
            nodes=nodes,
            tasks=len(nodes),
            job_name="watch",
            # --gres=none: the job's own step has the GPUs. --no-kill: a node that is lost ends the
            # samplers of no other. --unbuffered: a look is read as soon as it is written.
            more=[
                f"--jobid={self.job_id}",
                *part.srun,
                *("--gres=none", "--no-kill", "--unbuffered", "--quit-on-interrupt"),
            ],
        )
        argv = [*srun, sys.executable, *_SAMPLER, "--job", self.job_id, f"--idle={idle:.0f}"]

        def alone(node: str) -> Start:
            return self._start(replace(part, nodes=[node]), idle)

        return Start(argv, nodes, environment(), alone=alone if len(nodes) > 1 else None)

    def collect(self, out: Path, rounds: int, gap: float) -> list[str]:
        return [*_collector(sys.executable, out, rounds, gap), "--job", self.given]

    def missing(self) -> str:
        own = _user(os.getuid())
        if self.owner not in ("", own):
            return f"it is a job of {self.owner}, and this is {own}: run the watch as {self.owner}"
        return ""


@dataclass(frozen=True)
class Processes:
    """This user's processes whose command line matches; without `hosts` those of this machine.

    `python`: the interpreter on the hosts.
    """

    pattern: str
    hosts: Sequence[str] = ()
    python: str = sys.executable
    job_id: str = ""

    @property
    def label(self) -> str:
        where = f" on {len(self.hosts)} host(s)" if self.hosts else ""
        return f"{self.pattern}{where}"

    def phase(self) -> JobPhase:
        return JobPhase("runs")

    def starts(self, idle: float) -> list[Start]:
        # With `=`: a pattern may begin with a dash.
        options = [f"--match={self.pattern}", f"--idle={idle:.0f}"]
        if not self.hosts:
            return [Start([sys.executable, *_SAMPLER, *options], [node_name()])]
        command = f"exec {shlex.join([self.python, *_SAMPLER, *options])}"
        return [Start(ssh_argv(host, command), [host], label=True) for host in self.hosts]

    def collect(self, out: Path, rounds: int, gap: float) -> list[str]:
        command = [*_collector(sys.executable, out, rounds, gap), f"--match={self.pattern}"]
        if self.hosts:
            command += ["--hosts", ",".join(self.hosts), "--remote-python", self.python]
        return command

    def missing(self) -> str:
        """Other users' processes that match: their command lines can be read."""
        if self.hosts:
            return ""
        expression = re.compile(self.pattern)
        owners = (proc.owner(p) for p in proc.all_pids() if expression.search(proc.command(p)))
        others = {owner for owner in owners if owner not in (None, os.getuid())}
        names = sorted(_user(owner) for owner in others if owner is not None)
        return f"processes of {', '.join(names)} match: run the watch as that user" if names else ""


def _collector(python: str, out: Path, rounds: int, gap: float) -> list[str]:
    return [python, *COLLECTOR, "--out", str(out), "--rounds", str(rounds), "--gap", f"{gap:g}"]


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
