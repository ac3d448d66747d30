"""A job's request: its resources and `slurm_extra`, read and checked. Pure."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from snakemake_executor_plugin_submitit.extra import Extra, parse
from snakemake_executor_plugin_submitit.values import (
    ResourceError,
    line,
    node_names,
    number,
    option,
    switch,
)

# Least values; None: any.
_NUMBERS: Mapping[str, int | None] = {
    **dict.fromkeys(("runtime", "tasks", "tasks_per_node", "mpi_tasks", "gpu"), 0),
    **dict.fromkeys(("mem_mb", "mem_mb_per_cpu", "checkpoint_seconds"), 0),
    "nodes": 1,
    **dict.fromkeys(("tasks_per_gpu", "cpus_per_task", "cpus_per_gpu", "threads")),
}
_OPTIONS = ("slurm_partition", "qos", "constraint", "reservation", "clusters", "gres")
_ALIASES = {
    "slurm_qos": "qos",
    "slurm_constraint": "constraint",
    "slurm_reservation": "reservation",
    "cluster": "clusters",
    "slurm_cluster": "clusters",
}
# Snakemake's own names.
_SNAKEMAKE = frozenset(
    {"mem", "mem_mib", "disk", "disk_mb", "disk_mib", "tmpdir", "gpu_manufacturer"}
)
# Names that mean something elsewhere, and what to write here.
_ELSEWHERE = {
    "partition": "slurm_partition",
    "queue": "slurm_partition",
    "account": "slurm_account",
    "gpus": "gpu",
    "num_gpus": "gpu",
    "nvidia_gpu": "gpu",
    "gpus_per_node": "gpu",
    "slurm_gres": "gres",
    "time": "runtime",
    "time_min": "runtime",
    "timeout_min": "runtime",
    "walltime": "runtime",
    "mem_gb": "mem_mb",
    "num_nodes": "nodes",
    "slurm_nodes": "nodes",
    "ntasks": "tasks",
    "ntasks_per_node": "tasks_per_node",
    "ntasks_per_gpu": "tasks_per_gpu",
}
# A name this similar to a known one counts as a typing error.
_LIKENESS = 0.8
_MODEL = re.compile(r"[A-Za-z0-9_.-]+")
# One entry of a gres: gpu, gpu:2, gpu:a100, gpu:a100:2, each perhaps with sockets: (S:0)
_GPU_GRES = re.compile(r"gpu(?::(?![0-9]+$)([^:(]+))?(?::([0-9]{1,6}))?(?:\(.*)?")
# Slurm warns no earlier before a job's end: sbatch(1), --signal.
_LONGEST_WARNING = 65535


@dataclass(frozen=True)
class JobRequest:
    """A job's checked request: resources by one name each, and further options of sbatch."""

    resources: Mapping[str, Any]
    extra: Extra
    threads: int

    @property
    def accounts(self) -> tuple[str, ...]:
        """The accounts to try, in order."""
        names = re.split(r"[,\s]+", self.resources.get("slurm_account", ""))
        return tuple(name for name in names if name)

    @property
    def gpus(self) -> tuple[int, str]:
        """How many GPUs, on all nodes or by a `gres` on each, and their model."""
        gres = self.resources.get("gres", "")
        for entry in gres.split(","):
            if match := _GPU_GRES.fullmatch(entry.strip()):
                return int(match[2] or 1), match[1] or ""
        model = self.resources.get("gpu_model", "")
        alone = 1 if model and "gpu" not in gres else 0
        return self.resources.get("gpu", alone), model

    @property
    def is_gpu_job(self) -> bool:
        """Whether it asks for GPUs, by whatever name."""
        return self.gpus[0] > 0 or "gpu" in self.resources.get("gres", "")


def request(
    resources: Mapping[str, Any], threads: int, defaults: Mapping[str, Any] | None = None
) -> JobRequest:
    """Read a job's resources.

    Args:
        resources: the job's; names that begin with `_` are Snakemake's counters.
        threads: the job's threads.
        defaults: resources that hold where the job does not say otherwise.

    Raises:
        ResourceError: a value of the wrong type or range, or a contradiction.
    """
    given = _canonical(resources.items())
    extra = parse(given.pop("slurm_extra", ""))
    for name, value in _canonical(extra.resources.items()).items():
        if given.setdefault(name, value) != value:
            raise ResourceError(
                f"resource {name}={given[name]!r} and slurm_extra, which says {value!r}, differ:"
                " keep one"
            )
    if "no-requeue" in extra.names and given.setdefault("requeue", False):
        raise ResourceError("resource requeue and slurm_extra's --no-requeue differ: keep one")
    standing = _canonical((defaults or {}).items())
    if seconds := given.get("checkpoint_seconds"):
        _check_warning(given, extra, seconds)
        standing.pop("requeue", None)  # a warned job saves, and is requeued
    found = JobRequest({**standing, **given}, extra, max(1, threads))
    _check_tasks(found)
    return found


def doubtful_names(resources: Iterable[str]) -> dict[str, str]:
    """Warnings about names that have no effect but look as if they should, with the right name."""
    known = [*_READERS, *_ALIASES]
    found = {}
    for name in resources:
        if name[:1] == "_" or name in known or name in _SNAKEMAKE:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=_LIKENESS)
        if meant := _ELSEWHERE.get(name) or "".join(near):
            found[name] = (
                f"resource {name!r} means nothing to Slurm; if it is not a counter of your own,"
                f" did you mean {meant!r}?"
            )
    return found


def _canonical(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Known resources that are given, by one name each, read."""
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for name, raw in items:
        canonical = _ALIASES.get(name, name)
        # Values that Snakemake does not know yet are empty texts.
        if canonical not in _READERS or raw is None or (isinstance(raw, str) and not raw):
            continue
        value = _READERS[canonical](f"resource {name}", raw)
        if value is None:
            continue
        if found.setdefault(canonical, value) != value:
            raise ResourceError(f"resources {said[canonical]} and {name} differ: keep one")
        said.setdefault(canonical, name)
    return found


def _model(where: str, value: Any) -> str:
    text = line(where, value)
    if not _MODEL.fullmatch(text):
        raise ResourceError(f"{where}={text[:80]!r}: expected a GPU model, such as a100")
    return text


def _nodes(where: str, value: Any) -> str | None:
    return ",".join(node_names(value, where)) or None


def _exclusive(where: str, value: Any) -> str | bool | None:
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        return option(where, value)
    return switch(where, value) or None


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    **{name: partial(number, least=least) for name, least in _NUMBERS.items()},
    **dict.fromkeys(_OPTIONS, option),
    "slurm_account": option,
    "slurm_extra": line,
    "exclude_file": line,
    "node_file": line,
    "gpu_model": _model,
    "exclude": _nodes,
    "nodelist": _nodes,
    "exclusive": _exclusive,
    "requeue": switch,
    "mpi": lambda _where, value: bool(value) or None,
}


def _check_warning(given: Mapping[str, Any], extra: Extra, seconds: int) -> None:
    where = f"resource checkpoint_seconds={seconds}"
    if seconds > _LONGEST_WARNING:
        raise ResourceError(f"{where}: expected at most {_LONGEST_WARNING}")
    runtime = given.get("runtime")
    if runtime and seconds >= runtime * 60:
        raise ResourceError(f"{where}: expected less than runtime={runtime} minutes")
    if extra.signal:
        raise ResourceError(f"{where} and slurm_extra's --signal are both given: keep one")
    if given.get("requeue") is False:
        raise ResourceError(f"{where} needs a requeue, which requeue=false forbids: keep one")


def _check_tasks(asked: JobRequest) -> None:
    given = asked.resources
    if not given.get("mpi"):
        return
    tasks, per_node = given.get("tasks"), given.get("tasks_per_node")
    if tasks and per_node:
        raise ResourceError("resources tasks and tasks_per_node of an mpi job: keep one")
    if not (tasks or per_node or given.get("tasks_per_gpu") or "ntasks" in asked.extra.names):
        raise ResourceError("resource mpi: expected tasks or tasks_per_node beside it")
