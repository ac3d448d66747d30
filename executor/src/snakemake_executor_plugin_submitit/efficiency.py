"""The table at the end of a run: the share of CPUs and memory that each rule's jobs used."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from snakemake_executor_plugin_submitit.slurm import SlurmError, run

_HEADER = ("rule", "jobs", "CPU used", "memory used", "longest")
_FORMAT = "JobID,State,ElapsedRaw,TotalCPU,NNodes,NCPUS,ReqMem,MaxRSS,TRESUsageInTot"
# Joined they stay below 128 KiB, Linux's limit of one argument.
_IDS_AT_ONCE = 5000
# Seconds: the database hears of a job's end a little later than we do.
_PATIENCE = 10
_UNFINISHED = ("RUNNING", "PENDING", "SUSPENDED", "REQUEUED", "RESIZING")
# Before Slurm 21.08 the requested memory ends in `c`, each CPU's, or in `n`, each node's.
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]+)?)([KMGTP]?)([cn]?)")
# 1-02:03:04, 02:03:04 or 03:04.567
_TIME = re.compile(r"(?:([0-9]{1,6})-)?(?:([0-9]{1,6}):)?([0-9]{1,6}):([0-9]{1,6}(?:\.[0-9]+)?)")


class _Job(NamedTuple):
    """Seconds, `allocated` and `used` of CPUs, and MB (1024 x 1024 bytes); 0: not measured."""

    elapsed: int
    allocated: float
    used: float
    memory: float
    requested: float


def report(labels: Mapping[str, str], say: Callable[[str], None], cluster: str = "") -> None:
    """Report the table line by line, or the reason why there is none; never an error.

    Args:
        labels: rule and wildcards by Slurm's job id.
        cluster: one of several that share a database; empty: the one of this host.
    """
    try:
        jobs, waited = _ended(labels, cluster), 0
        while len(jobs) < len(labels) and waited < _PATIENCE:
            time.sleep(1)
            jobs, waited = _ended(labels, cluster), waited + 1
        lines = _table(jobs, labels) if jobs else ["no efficiency report: sacct knows no ended job"]
    except SlurmError as error:
        lines = [f"no efficiency report: {' '.join(str(error).split())}"]
    for line in lines:
        say(line)


def _ended(labels: Mapping[str, str], cluster: str) -> dict[str, _Job]:
    rows = [row for row in _sacct(labels, cluster) if len(row) == _FORMAT.count(",") + 1]
    memory: dict[str, list[float]] = defaultdict(lambda: [0])
    for job_id, *_, largest_task, all_tasks in rows:
        for size in re.findall(r"(?<=,mem=)[^,]+", f",mem={largest_task},{all_tasks}"):
            memory[job_id.partition(".")[0]].append(_megabytes(size))
    jobs = [row for row in rows if row[0] in labels and not row[1].startswith(_UNFINISHED)]
    return {row[0]: _job(row, max(memory[row[0]])) for row in jobs}


def _sacct(job_ids: Iterable[str], cluster: str) -> Iterator[list[str]]:
    ids = sorted({job_id.partition("_")[0] for job_id in job_ids})
    command = ["sacct", "--noheader", "--parsable2", "--format", _FORMAT]
    command += ["--clusters", cluster] if cluster else []
    for first in range(0, len(ids), _IDS_AT_ONCE):
        text = run([*command, "--jobs", ",".join(ids[first : first + _IDS_AT_ONCE])])
        yield from (line.split("|") for line in text.splitlines())


def _job(row: Sequence[str], memory: float) -> _Job:
    texts = (row[2], row[4], row[5])
    elapsed, nodes, cpus = (int(n) if re.fullmatch("[0-9]{1,12}", n) else 0 for n in texts)
    used = _seconds(row[3])
    # Of an interrupted job nothing may be gathered: no CPU time and no memory are no measurement.
    allocated = elapsed * cpus if used is not None and (used or memory) else 0
    requested = _megabytes(row[6], nodes=nodes, cpus=cpus)
    return _Job(elapsed, allocated, used if used and allocated else 0, memory, requested)


def _seconds(text: str) -> float | None:
    if (match := _TIME.fullmatch(text)) is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _megabytes(text: str, *, nodes: int = 1, cpus: int = 1) -> float:
    if (match := _SIZE.fullmatch(text)) is None:
        return 0
    megabytes = float(match[1]) * 1024.0 ** ("BKMGTP".index(match[2] or "B") - 2)
    return megabytes * {"": 1, "n": nodes, "c": cpus}[match[3]]


def _table(jobs: Mapping[str, _Job], labels: Mapping[str, str]) -> list[str]:
    rules: dict[str, list[_Job]] = defaultdict(list)
    for job_id, job in jobs.items():
        # A group has its name alone.
        rules[re.split(r" \w+=", labels[job_id])[0]].append(job)
    rows = [_HEADER, *((rule, *_cells(rules[rule])) for rule in sorted(rules))]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]


def _cells(jobs: Sequence[_Job]) -> tuple[str, ...]:
    # Long and wide jobs weigh more.
    allocated = sum(job.allocated for job in jobs)
    cpu = f"{sum(job.used for job in jobs) / allocated:.0%}" if allocated else "-"
    shares = [(j.memory / j.requested, j.memory, j.requested) for j in jobs if j.requested]
    share, used, requested = max(shares, default=(0, 0, 0))
    memory = f"{share:.0%} ({used:.0f} of {requested:.0f} MB)" if used else "-"
    return str(len(jobs)), cpu, memory, str(timedelta(seconds=max(job.elapsed for job in jobs)))
