"""Collect the evidence of this host's processes: bounded in time, atomic, never raising."""

import functools
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from shakedown.core.paths import AttemptPaths
from shakedown.monitor.collect import hooked, inside, logs, node, proc, pyspy, ras, ray
from shakedown.monitor.collect.bounded import run_bounded
from shakedown.monitor.collect.targets import Target
from shakedown.monitor.collect.writer import BEATS, COLLECTED, NAMES, Writer, printable
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.progress.signs import Beat
from shakedown.slurm.hostlist import is_node_name, node_name

NODE_SECONDS = 90.0  # all of py-spy's work of one round
GRACE_SECONDS = 10.0  # for ending the last of them; who takes longer is left behind
SOURCE_SECONDS = 30.0  # NCCL RAS, GPUs and Slurm together
WORKERS = 8
BEATS_SECONDS = 10.0  # a file system that is gone never answers


_GONE: dict[str, object] = {"state": "X", "wchan": "", "threads": []}


@dataclass
class TargetReport:
    """Findings about one process: states by round, and what could not be read.

    `inner_pid`: its id in its own container, None where that is `pid`. `world`: as a Target's.
    """

    name: str
    pid: int
    role: str
    rank: int | None
    states: list[dict[str, object]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # files with its stacks
    inner_pid: int | None = None
    world: int = 0


@dataclass
class CollectReport:
    """Files written, by target what was missed, and what was missed as a whole."""

    host: str
    targets: list[TargetReport]
    files: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    node: dict[str, str] = field(default_factory=dict)  # RAS, GPUs, Slurm: read, or why not
    seconds: float = 0.0
    written: bool = False  # `collected-<host>.json`: what was missed is on disk


def collect_local(
    targets: Sequence[Target],
    out: Path,
    *,
    logs: Path | None = None,
    rounds: int = 2,
    gap: float = 5.0,
    heartbeats: Path | None = None,
    native: bool = False,
    always_pyspy: bool = False,
    missed: Sequence[str] = (),
    absent: Sequence[int] = (),
) -> CollectReport:
    """Sample every target `rounds` times, `gap` seconds apart, and copy dumps and log ends.

    A process with our hook writes its own stacks; py-spy reads the others, those that run, those
    with Python children, and those whose own stacks do not say enough.

    Args:
        out: where everything is written: an attempt's `evidence/`, or any folder.
        logs: folder of logs whose ends are copied; None copies those of the files that the
            processes print to.
        heartbeats: folder of heartbeats; by default the one beside `out`.
        native: C and C++ frames too, by py-spy, which those that use CUDA show anyhow.
        always_pyspy: py-spy reads every process.
        missed: what the caller could not find, to be written down with the rest.
        absent: ranks of this node without a process.

    Nothing is raised for a target or a disk that fails; the report and
    `collected-<host>.json` say what was missed.
    """
    begin = time.monotonic()
    collection = _Collection(targets, out, native=native, always_pyspy=always_pyspy or native)
    collection.writer.missed += missed
    folder = heartbeats or AttemptPaths(out.parent).heartbeats
    for number in range(1, rounds + 1):
        if number > 1:
            time.sleep(gap)
        collection.beats(folder, number)
        collection.stacks(number)
    collection.recorders(rounds)  # after the stacks: answering takes the interpreter's time
    collection.ask_node()
    if logs is not None:
        collection.logs(logs)
    else:
        collection.output()
    return collection.finish(rounds, begin, absent)


def collect_cluster(address: str, out: Path) -> None:
    """Collect the Ray cluster's view of a job that has ended, from `address`; never raises."""
    writer = Writer(out)
    job = functools.partial(node.ask, "ray", {"ray": functools.partial(ray.query, (), address)})
    (given,) = run_bounded([job], 1, SOURCE_SECONDS)
    for suffix, text in given.files if isinstance(given, node.SourceAnswer) else ():
        writer.text(f"{_label()}-{suffix}", text)


class _Collection:
    """One collection: its targets, their hooks and rows, and the writer."""

    def __init__(
        self, targets: Sequence[Target], out: Path, *, native: bool, always_pyspy: bool
    ) -> None:
        # Components may share a process, which is then signalled and read once.
        self._targets = list({t.pid: t for t in reversed(targets)}.values())[::-1]
        self._native, self._always = native, always_pyspy
        found = [(t, t.hook or hooked.find(t.pid)) for t in self._targets]
        hooks = [h or hooked.find_by_file(t.pid, t.name, out) for t, h in found]
        self._hooks = [h for h in hooks if h is not None]
        self._stacks = hooked.Stacks(self._hooks)
        self._rows = {
            t.pid: TargetReport(
                t.name, t.pid, t.role, t.rank, inner_pid=inside.inner_pid(t.pid), world=t.world
            )
            for t in self._targets
        }
        self._label = _label()
        self._node: dict[str, str] = {}
        self.writer = Writer(out)
        twice = len(targets) - len(self._targets)
        if twice:
            self.writer.missed.append(f"{twice} components share a process with another one")

    def beats(self, folder: Path, number: int) -> None:
        """Write the beats, named by host: collectors of several nodes write into one folder."""
        reading = read_beats(folder)
        self.writer.missed += [reading.missed] if reading.missed else []
        if reading.beats:
            body = _beats_json(number, reading)
            self.writer.json(NAMES.beats(number, self._label), body)

    def stacks(self, number: int) -> None:
        """One round: states first, which affect no process; then own dumps; then py-spy."""
        states = {t.pid: proc.read_state(t.pid) for t in self._targets}
        for target in self._targets:
            row = self._rows[target.pid]
            row.states.append(states[target.pid].to_json())
            if not states[target.pid].alive:
                row.missed.append(f"round {number}: the process is gone")
        living = [t for t in self._targets if states[t.pid].alive]
        pausable = [t.pid for t in living if states[t.pid].pausable]
        dumps, lost = self._stacks.dump(pausable)
        for target in living:
            row = self._rows[target.pid]
            if target.pid in lost:
                row.missed.append(f"round {number}: {lost[target.pid]}")
            if target.pid in dumps:
                name = str(NAMES.in_round(number).stacks(target.file_name))
                if self.writer.data(name, dumps[target.pid]):
                    row.sources.append(name)
        # Of a process that sleeps (S) its own stack is enough; of others only py-spy tells whether
        # it works or waits.
        told = {pid for pid in dumps if not self._always and states[pid].state == "S"}
        self._pyspy(number, [t for t in living if t.pid not in told or self._strays(t)], states)

    def _strays(self, target: Target) -> bool:
        """Whether it has Python children that are not targets: py-spy reads both."""
        own = {t.pid for t in self._targets}
        return any(map(proc.is_python, proc.children(target.pid) - own))

    def _pyspy(
        self, number: int, targets: Sequence[Target], states: dict[int, proc.ProcState]
    ) -> None:
        until = time.monotonic() + NODE_SECONDS
        jobs = [
            functools.partial(
                pyspy.dump,
                target.pid,
                pause=states[target.pid].pausable,
                children=self._strays(target),
                # Whether a rank waits for its GPU no frame of Python shows.
                native=self._native or proc.uses_cuda(target.pid),
                until=until,
            )
            for target in targets
        ]
        results = run_bounded(jobs, WORKERS, NODE_SECONDS + GRACE_SECONDS)
        for target, dumps in zip(targets, results, strict=True):
            self._keep(number, target, dumps)

    def _keep(
        self, number: int, target: Target, dumps: list[pyspy.Dump] | Exception | None
    ) -> None:
        row = self._rows[target.pid]
        if not isinstance(dumps, list):
            why = dumps or f"not read within this node's {NODE_SECONDS:.0f} s"
            row.missed.append(f"round {number}: py-spy: {why}")
            return
        for dump in dumps:
            name = str(NAMES.in_round(number).pyspy(target.file_name, dump.suffix))
            if dump.error:
                first = _why(target.pid, dump.error.splitlines()[0])
                row.missed.append(f"round {number}: py-spy {dump.suffix}: {first}")
                self.writer.text(f"{name}.error.txt", dump.error + "\n")
            elif self.writer.text(name, dump.text):
                row.sources.append(name)

    def recorders(self, number: int) -> None:
        """Flight Recorder dumps; a rank whose interpreter does not answer is read from outside."""
        asked, lost = hooked.request_recorders(self._hooks)
        self.writer.missed += lost
        silent = hooked.await_recorders(self._hooks, asked) if not lost else []
        # Where they wrote into `out` itself there is nothing to copy.
        for found in self._hooks:
            if not _within(found.evidence, self.writer.out):
                for name, body in hooked.recorder_dumps(found, asked):
                    self.writer.data(name, body)
        for found in silent:
            text = "flight recorder: the process did not answer the request"
            self._rows[found.pid].missed.append(text)
        pids = {h.pid for h in silent}
        unread = [t for t in self._targets if t.pid in pids and not self._read_from_outside(t)]
        if unread:
            self._pyspy(number, unread, {t.pid: proc.read_state(t.pid) for t in unread})

    def _read_from_outside(self, target: Target) -> bool:
        sources = self._rows[target.pid].sources
        return any("/pyspy-" in name for name in sources)

    def ask_node(self) -> None:
        """Ask NCCL RAS, GPUs and Slurm; a driver that never answers is abandoned."""
        # RAS of an inference engine has ranks of its own.
        ranks = [r.pid for r in self._rows.values() if r.role == "trainer" and r.rank is not None]
        asks_ras: node.Query = functools.partial(ras.query, ranks)
        asks_ray: node.Query = functools.partial(ray.query, list(self._rows))
        sources = {"nccl ras": asks_ras, **node.SOURCES, "ray": asks_ray}
        names = list(sources)
        jobs = [functools.partial(node.ask, name, sources) for name in names]
        answers = run_bounded(jobs, len(jobs), SOURCE_SECONDS)
        for name, given in zip(names, answers, strict=True):
            late = node.SourceAnswer("failed", missed=str(given or "no answer in time"))
            answer = given if isinstance(given, node.SourceAnswer) else late
            self._node[name] = answer.said
            for suffix, text in answer.files:
                self.writer.text(f"{self._label}-{suffix}", text)
            if answer.missed:
                self.writer.missed.append(f"{name}: {answer.missed}")

    def logs(self, folder: Path) -> None:
        try:
            logs.copy_ends(logs.logs_in(folder), self.writer, folder)
        except OSError as error:
            if not (isinstance(error, FileNotFoundError) and self._contained_logs(folder)):
                self.writer.missed.append(printable(f"logs {folder}: {error.strerror}"))

    def _contained_logs(self, folder: Path) -> int:
        """Copy the logs at this path in the targets' containers; returns how many have it."""
        own = [pid for pid in self._rows if not inside.shares_files(pid)]
        with inside.folders(own, folder.absolute()) as found:
            for number, place in enumerate(found):
                below = Path(f"container{number}" if len(found) > 1 else "")
                try:
                    paths = logs.logs_in(place)
                except OSError as error:
                    text = f"logs {folder} of a container: {error.strerror}"
                    self.writer.missed.append(printable(text))
                    continue
                logs.copy_ends(paths, self.writer, place, below, follow=False)
            return len(found)

    def output(self) -> None:
        """Copy the processes' output if it goes to files; bounded: file systems may be dead."""
        names = {t.pid: t.file_name for t in self._targets}
        job = functools.partial(logs.copy_output, names, self.writer)
        (given,) = run_bounded([job], 1, SOURCE_SECONDS)
        if not isinstance(given, int):
            why = given or f"not read in {SOURCE_SECONDS:.0f} s"
            self.writer.missed.append(printable(f"output of the processes: {why}"))

    def finish(self, rounds: int, begin: float, absent: Sequence[int]) -> CollectReport:
        """Write the table last, so that whoever finds it finds everything it names."""
        writer = self.writer
        self._stacks.clear(writer.out)
        rows = list(self._rows.values())
        rows += [
            TargetReport(f"trainer-rank{r}", 0, "trainer", r, [_GONE], ["it has no process here"])
            for r in absent
        ]
        seconds = round(time.monotonic() - begin, 2)
        report = CollectReport(socket.gethostname(), rows, writer.files, [], self._node, seconds)
        # Again, as writing the table may have failed too.
        report.missed = writer.summary()
        report.written = writer.json(NAMES.collected(self._label), _table(report, rounds))
        report.missed = writer.summary()
        return report


def _why(pid: int, said: str) -> str:
    """The message of py-spy, and the permission that it lacked."""
    hidden = not proc.visible(pid) and proc.read_state(pid).alive
    if not hidden and "ermission" not in said and "permitted" not in said:
        return said
    lacks = f"{'this container' if inside.contained() else 'this user'} lacks SYS_PTRACE, "
    lacks = "" if inside.may_trace() else lacks
    return f"no permission: {lacks}another user's, or more capabilities ({said})"


def _label() -> str:
    """The name of this node in file names: Slurm's, as several nodes may share a host."""
    name = node_name()
    return name if is_node_name(name) else "this-host"


def _within(folder: Path, out: Path) -> bool:
    try:
        return folder.samefile(out)
    except OSError:
        return False


def _table(report: CollectReport, rounds: int) -> dict[str, object]:
    return {
        "schema": COLLECTED,
        "host": report.host,
        "collected": datetime.now(UTC).isoformat(timespec="seconds"),
        "rounds": rounds,
        "seconds": report.seconds,
        "targets": [vars(row) for row in report.targets],
        "files": [printable(name) for name in report.files],
        "missed": report.missed,
        "node": report.node,
    }


@dataclass(frozen=True)
class BeatsReading:
    """One look: the newest beat of each component, and what was missed.

    `taken` is when, `began` when the folder's last file was made: Unix time, 0 for unknown.
    """

    beats: list[Beat]
    taken: float
    began: float
    missed: str = ""


def read_beats(folder: Path) -> BeatsReading:
    """The beats of a folder; bounded in time, never raising."""
    (files,) = run_bounded([functools.partial(_beat_files, folder)], 1, BEATS_SECONDS)
    taken = round(time.time(), 3)
    if isinstance(files, tuple):
        return BeatsReading(files[0], taken, files[1])
    missed = f"heartbeats: {folder} was not read within {BEATS_SECONDS:.0f} s"
    return BeatsReading([], taken, 0.0, missed)


def _beat_files(folder: Path) -> tuple[list[Beat], float]:
    """The written beats, and when the folder's last file was made; 0 when that cannot be read."""
    # Records are overwritten in place, so a folder's time changes only when a file is made.
    try:
        began = round(folder.stat().st_mtime, 3)
    except OSError:
        began = 0.0
    return read_heartbeats(folder), began


def _beats_json(number: int, reading: BeatsReading) -> dict[str, object]:
    """The content of `round<number>/beats-<host>.json`."""
    times = {"taken": reading.taken, "began": reading.began}
    return {"schema": BEATS, "round": number, **times, "beats": [asdict(b) for b in reading.beats]}
