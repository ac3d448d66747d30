"""The report at the end of a run: how much of its CPUs and memory each job has used."""

import csv
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.slurm import SlurmError

_FORMAT = "JobID,State,ElapsedRaw,TotalCPU,NNodes,NCPUS,MaxRSS,ReqMem,TRESUsageInTot"
_COLUMNS = _FORMAT.count(",") + 1
_HEADER = (
    *("JobID", "Job", "State", "Elapsed (s)", "CPUs", "CPU Efficiency (%)"),
    *("Memory (MB)", "Requested Memory (MB)", "Memory Usage (%)"),
)
# Joined they stay below 128 KiB, Linux's limit of one argument.
_IDS_AT_ONCE = 5000
# The database hears of a job's end a little later than we do.
_PATIENCE, _PAUSE = 10.0, 1.0
_UNFINISHED = ("RUNNING", "PENDING", "SUSPENDED", "REQUEUED", "RESIZING")
_LINES = 10
_LABEL_LENGTH = 60
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
# Before Slurm 21.08 the requested memory ends in `c`, each CPU's, or in `n`, each node's.
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGTP]?)(?P<each>[cn]?)")
_CPU_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)")
_TOTAL_MEMORY = re.compile(r"(?:^|,)mem=([^,]+)")


@dataclass(frozen=True)
class Row:
    """One job. Seconds and MB (1024 x 1024 bytes); None is what Slurm has not measured.

    `cpu_efficiency` is the share of the allocated CPU time that was used, 1 is all of it.
    `memory` is that of the job's largest step: all its tasks on all nodes, each at its highest.
    """

    job_id: str
    label: str
    state: str
    elapsed: int
    cpus: int
    cpu_efficiency: float | None
    memory: float | None
    requested: float | None

    @property
    def memory_efficiency(self) -> float | None:
        """The used share of the requested memory, 1 is all of it."""
        if self.memory is None or not self.requested:
            return None
        return self.memory / self.requested


def report(
    labels: Mapping[str, str],
    path: Path,
    threshold: float,
    say: Callable[[str], None],
    cluster: str = "",
) -> None:
    """Write the report and say which jobs left much of their CPUs unused; never an error.

    Args:
        labels: rule and wildcards by Slurm's job id.
        path: the file; see `report_path`.
        threshold: CPU efficiency, above 0 to 1, below which a job is named.
        say: gets each line.
        cluster: as of `collect`.
    """
    try:
        rows = collect(labels, cluster)
        if not rows:
            say("no efficiency report: the accounting database knows none of this run's jobs")
            return
        write(rows, path)
    except (SlurmError, OSError) as error:
        say(f"no efficiency report: {error}")
        return
    say(f"efficiency report of {len(rows)} job(s): {path}")
    for line in low(rows, threshold):
        say(line)


def report_path(given: str, run: str) -> Path:
    """Where a run's report goes: the given file, or a file of its own in the given folder.

    Empty is the working directory; a path without a suffix is a folder, which may be missing yet.
    """
    path = Path(given or ".")
    return path / f"efficiency_report_{run}.csv" if path.is_dir() or not path.suffix else path


def collect(
    labels: Mapping[str, str],
    cluster: str = "",
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Row]:
    """Ask sacct about jobs; again for up to 10 s while it has not heard of the end of all.

    Args:
        labels: rule and wildcards by Slurm's job id.
        cluster: one of several that share a database; empty: the one of this host.

    Raises:
        SlurmError: there is no accounting database, or it does not answer.
    """
    if not labels:
        return []
    waited = 0.0
    while True:
        rows = parse("\n".join(_sacct(labels, cluster)), labels)
        if len(rows) == len(labels) or waited >= _PATIENCE:
            return rows
        sleep(_PAUSE)
        waited += _PAUSE


def _sacct(job_ids: Iterable[str], cluster: str) -> Iterator[str]:
    main_ids = sorted({job_id.partition("_")[0] for job_id in job_ids})
    command = ["sacct", "--noheader", "--parsable2", "--format", _FORMAT]
    if cluster:
        command += ["--clusters", cluster]
    for first in range(0, len(main_ids), _IDS_AT_ONCE):
        yield slurm.run([*command, "--jobs", ",".join(main_ids[first : first + _IDS_AT_ONCE])])


def parse(text: str, labels: Mapping[str, str]) -> list[Row]:
    """sacct's lines of `_FORMAT` as one row a job; jobs without a label or an end are left out."""
    jobs: dict[str, list[str]] = {}
    memory: dict[str, float] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != _COLUMNS:
            continue
        job_id, _, step = fields[0].partition(".")
        if job_id not in labels:
            continue
        if not step:
            jobs[job_id] = fields
        elif (used := _used(fields)) is not None:
            memory[job_id] = max(used, memory.get(job_id, 0.0))
    return [
        _row(fields, labels[job_id], memory.get(job_id))
        for job_id, fields in jobs.items()
        if not fields[1].startswith(_UNFINISHED)
    ]


def _row(fields: Sequence[str], label: str, memory: float | None) -> Row:
    job_id, state, elapsed, cpu_time, nodes, cpus, _, requested, _ = fields
    seconds, count, used = _whole(elapsed), _whole(cpus), _seconds(cpu_time)
    # Of an interrupted job nothing may be gathered: no CPU time and no memory are no measurement.
    is_measured = bool(used) or memory is not None
    allocated = seconds * count
    return Row(
        job_id=job_id,
        label=label,
        state=state.partition(" ")[0],  # CANCELLED by 1000
        elapsed=seconds,
        cpus=count,
        cpu_efficiency=used / allocated if used is not None and is_measured and allocated else None,
        memory=memory,
        requested=_megabytes(requested, nodes=_whole(nodes), cpus=count),
    )


def _used(fields: Sequence[str]) -> float | None:
    """A step's memory in MB: that of all its tasks together, else that of its largest task."""
    total = _TOTAL_MEMORY.search(fields[8])
    used = _megabytes(total[1]) if total else None
    return used if used is not None else _megabytes(fields[6])


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _seconds(text: str) -> float | None:
    """Of `1-02:03:04`, `02:03:04` or `03:04.567`; None for another form."""
    match = _CPU_TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _megabytes(text: str, *, nodes: int = 1, cpus: int = 1) -> float | None:
    """Of `156460K`, `4G`, `4Gn` or bytes without a unit; None for another form such as `16?`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    each = {"": 1, "n": nodes, "c": cpus}[match["each"]]
    return float(match["number"]) * _UNITS.get(match["unit"], 1 / 1024**2) * each


def write(rows: Iterable[Row], path: Path) -> None:
    """Write the rows as CSV; a reader never sees half of them.

    Raises:
        OSError: the folder cannot be made or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        # "x": it is new, and no link that somebody has put there.
        with temporary.open("x", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(_HEADER)
            writer.writerows(_cells(row) for row in rows)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        *(row.job_id, row.label, row.state, str(row.elapsed), str(row.cpus)),
        _number(row.cpu_efficiency, 100),
        _number(row.memory),
        _number(row.requested),
        _number(row.memory_efficiency, 100),
    )


def _number(value: float | None, factor: float = 1) -> str:
    """With two decimals; empty for what is not known."""
    return "" if value is None else f"{value * factor:.2f}"


def low(rows: Iterable[Row], threshold: float) -> list[str]:
    """A line for each job whose CPU efficiency is below the threshold, the worst ten."""
    measured = [(row.cpu_efficiency, row) for row in rows if row.cpu_efficiency is not None]
    found = sorted((pair for pair in measured if pair[0] < threshold), key=lambda pair: pair[0])
    lines = [
        f"{' '.join(row.label.split())[:_LABEL_LENGTH]} ({row.job_id}) used {efficiency:.0%} of its"
        f" {row.cpus} CPU(s){_memory_words(row)}"
        for efficiency, row in found[:_LINES]
    ]
    if len(found) > _LINES:
        lines.append(
            f"{len(found) - _LINES} more jobs used less than {threshold:.0%} of their CPUs"
        )
    return lines


def _memory_words(row: Row) -> str:
    share = row.memory_efficiency
    return "" if share is None else f" and {share:.0%} of its {row.requested:.0f} MB"
