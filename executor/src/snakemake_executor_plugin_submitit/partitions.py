"""The choice of a partition by its limits, which a file names. Pure but for `read`.

Form, rule and variable are those of snakemake-executor-plugin-slurm; docs/further.md has the table
of limits. The fitting partition with the highest score is chosen, of equals the first one: the
more of a partition's room a job needs, the better it belongs there.
"""

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, inf
from pathlib import Path
from re import ASCII, findall, fullmatch
from typing import Any

import yaml
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit.request import JobRequest
from snakemake_executor_plugin_submitit.values import slurm_seconds

VARIABLE = "SNAKEMAKE_SLURM_PARTITIONS"

_SIZE_LIMIT = 1 << 20
_MOST_NODES = 20_000  # keys and values, with those that `<<` brings in
_DEEPEST = 20
_LONGEST_NUMBER = 100
_CLUSTER_KEYS = ("slurm_cluster", "cluster", "clusters")
# Resources with a limit of their own, in the order in which their shares are added.
_RESOURCES = ("mem_mb", "mem_mb_per_cpu", "runtime", "nodes", "tasks", "tasks_per_node")
_LIMITS = (
    *(f"max_{name}" for name in _RESOURCES),
    *("max_mpi_tasks", "max_threads", "max_cpus_per_task", "max_cpus_per_gpu", "max_gpu"),
)
_LISTS = ("available_gpu_models", "available_constraints")
_KEYS = (*_LIMITS, *_LISTS, "supports_mpi", *_CLUSTER_KEYS)
# Below 2**53, up to which a float holds every whole number.
_LARGEST = 1e15
# A few words of whatever stands in a file; its aliases may make it endless.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_UNIT_MINUTES = {"d": 1440.0, "h": 60.0, "m": 1.0, "s": 1 / 60}


@dataclass(frozen=True)
class Partition:
    """A partition and its limits; a limit that is not named is infinite, `max_gpu` 0."""

    name: str
    limits: Mapping[str, float] = field(default_factory=dict)
    gpu_models: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    supports_mpi: bool = True
    cluster: str = ""

    def limit(self, name: str) -> float:
        """The limit `max_NAME`."""
        return self.limits.get(f"max_{name}", 0 if name == "gpu" else inf)


def config_file(setting: str, environment: Mapping[str, str]) -> Path | None:
    """The file that the setting names, or else the variable; None when neither does."""
    name = setting or environment.get(VARIABLE, "")
    return Path(name).expanduser() if name else None


def read(path: Path) -> tuple[Partition, ...]:
    """The file's partitions, in its order.

    Raises:
        WorkflowError: it cannot be read, is too large, or is not of the form above.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(_SIZE_LIMIT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise WorkflowError(f"cannot read the partitions' file {path}: {error}") from error
    if len(text) > _SIZE_LIMIT:
        raise WorkflowError(f"{path}: more than {_SIZE_LIMIT} characters: not a partitions file")
    try:
        content = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    # Also a date that does not exist, and `<<` in a circle.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise WorkflowError(f"{path} is not YAML: {error}") from error
    return parse(content, str(path))


class _Loader(yaml.SafeLoader):
    """YAML whose text bounds its work: `<<` of `<<` doubles keys, `1:1:1...` is a huge number."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._count(1)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise yaml.YAMLError(f"it is nested deeper than {_DEEPEST} levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(each, yaml.MappingNode) and each is not node:
                        self.flatten_mapping(each)
                        self._count(len(each.value))
        super().flatten_mapping(node)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if number and len(node.value) > _LONGEST_NUMBER:
            raise yaml.YAMLError(f"a number has more than {_LONGEST_NUMBER} characters")
        return super().construct_scalar(node)

    def _count(self, more: int) -> None:
        self._nodes += more
        if self._nodes > _MOST_NODES:
            raise yaml.YAMLError(f"it has more than {_MOST_NODES} keys and values")


def parse(content: Any, where: str) -> tuple[Partition, ...]:
    """The partitions of a file's content; `where` names the file.

    Raises:
        WorkflowError: it is not of the form above.
    """
    partitions = content.get("partitions") if isinstance(content, dict) else None
    if not isinstance(partitions, dict) or not partitions:
        raise WorkflowError(f"{where}: expected a mapping `partitions:` with one key per partition")
    return tuple(
        _partition(name, keys, f"{where}: partition {_SHORT.repr(name)}")
        for name, keys in partitions.items()
    )


def choose(partitions: Sequence[Partition], asked: JobRequest) -> tuple[str, str]:
    """The best partition's name and an empty text, or an empty name and why none fits."""
    judged = [(partition, score(partition, asked)) for partition in partitions]
    fitting = [(value, p.name) for p, value in judged if not isinstance(value, str)]
    if fitting:
        return max(fitting, key=lambda pair: pair[0])[1], ""
    return "", "; ".join(f"{p.name}: {reason}" for p, reason in judged)


def score(partition: Partition, asked: JobRequest) -> float | str:
    """The job's score in the partition, or why it does not fit."""
    if reason := _mismatch(partition, asked):
        return reason
    total = 0.0
    for value, limit in _shares(asked):
        most = partition.limit(limit)
        if value > most:
            return f"{limit} {value:g} is above its {most:g}"
        if value > 0:
            total += value / most
    # A job without GPUs is better off where there are none.
    return total - 1 if partition.limit("gpu") and not asked.gpus[0] else total


def _mismatch(partition: Partition, asked: JobRequest) -> str:
    """Why the job does not fit, numbers apart; empty when it does."""
    given = asked.resources
    count, model = asked.gpus
    wanted = given.get("clusters", "")
    if wanted != partition.cluster:
        return f"it is on cluster {partition.cluster}" if partition.cluster else f"not on {wanted}"
    if count and model and partition.gpu_models and model not in partition.gpu_models:
        return f"no gpu_model {model}"
    if given.get("mpi") and not partition.supports_mpi:
        return "no mpi"
    features = [word.strip() for word in given.get("constraint", "").split(",") if word.strip()]
    missing = [feature for feature in features if feature not in partition.constraints]
    return f"no constraint {','.join(missing)}" if partition.constraints and missing else ""


def _shares(asked: JobRequest) -> list[tuple[float, str]]:
    """The job's requests, each with its limit's name; 0 requests nothing."""
    given = asked.resources
    shares: list[tuple[float, str]] = [
        (max(0, given.get(name, 0)), name) for name in (*_RESOURCES, "mpi_tasks")
    ]
    # A rule may say its threads among its resources.
    threads = asked.threads if asked.threads > 1 else max(1, given.get("threads", 1))
    shares.append((threads, "threads"))
    if "cpus_per_task" in given:
        cpus = given["cpus_per_task"]
        per_task = max(1, cpus) if cpus >= 0 else 0
        shares += [(per_task, "threads"), (per_task, "cpus_per_task")]
    elif asked.is_gpu_job and "cpus_per_gpu" in given:
        shares.append((max(0, given["cpus_per_gpu"]), "cpus_per_gpu"))
    else:
        shares += [(threads, "threads"), (threads, "cpus_per_task")]
    return [*shares, (asked.gpus[0], "gpu")]


def _partition(name: Any, keys: Any, where: str) -> Partition:
    text = str(name) if isinstance(name, str | int) and not isinstance(name, bool) else ""
    if not fullmatch(r"[^\s,\\]+", text) or not text.isprintable():
        raise WorkflowError(f"{where}: expected a partition's name")
    if keys is None:
        keys = {}
    if not isinstance(keys, dict):
        raise WorkflowError(f"{where}: expected a mapping of limits, such as max_runtime: 60")
    for key in keys:
        _check_key(key, where)
    cluster = next((key for key in _CLUSTER_KEYS if key in keys), "cluster")
    mpi = keys.get("supports_mpi", True)
    if not isinstance(mpi, bool):
        raise WorkflowError(f"{where}: supports_mpi: expected true or false")
    return Partition(
        text,
        {key: _limit(keys[key], key, where) for key in _LIMITS if key in keys},
        gpu_models=_names(keys, "available_gpu_models", where),
        constraints=_names(keys, "available_constraints", where),
        supports_mpi=mpi,
        cluster=",".join(_names(keys, cluster, where)),
    )


def _check_key(key: Any, where: str) -> None:
    if key in _KEYS:
        return
    near = difflib.get_close_matches(str(key)[:80], _KEYS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise WorkflowError(f"{where}: unknown key {_SHORT.repr(key)}{hint}; valid: {', '.join(_KEYS)}")


def _limit(value: Any, key: str, where: str) -> float:
    if key == "max_runtime":
        minutes = _minutes(value)
        if minutes is None:
            raise WorkflowError(
                f"{where}: {key}: {_SHORT.repr(value)} is not a time; expected minutes, 12h,"
                " 2d12h30m, D-HH:MM:SS or HH:MM:SS"
            )
        return minutes
    if not _is_limit(value):
        raise WorkflowError(f"{where}: {key}: {_SHORT.repr(value)} is not a number of 0 or more")
    return float(value)


def _is_limit(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (0 <= value <= _LARGEST or value == inf)


def _minutes(value: Any) -> float | None:
    """Minutes, halves rounded up; None if it is not a time."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("unlimited", "infinite"):
            return inf
        if fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", text):
            return _minutes(float(text))
        if fullmatch(r"([0-9]{1,9}(\.[0-9]{1,9})?\s*[dhms]\s*)+", text):
            parts = findall(r"([0-9.]+)\s*([dhms])", text)
            return _minutes(sum(float(count) * _UNIT_MINUTES[unit] for count, unit in parts))
        # In this form a pair is hours and minutes, where Slurm's own is minutes and seconds.
        pair = fullmatch(r"\d{1,9}:\d{1,9}", text, ASCII)
        seconds = slurm_seconds(f"{text}:00" if pair else text)
        return None if seconds is None else _minutes(seconds / 60)
    if not _is_limit(value):
        return None
    return inf if value == inf else floor(value + 0.5)


def _names(keys: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A list of names, or a text of them with commas; a number is its digits."""
    value = keys.get(key, [])
    if isinstance(value, str):
        value = value.split(",")
    entries = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, str | int) and not isinstance(entry, bool) for entry in entries):
        raise WorkflowError(f"{where}: {key}: {_SHORT.repr(value)}: expected a list of names")
    return tuple(str(entry).strip() for entry in entries if str(entry).strip())
