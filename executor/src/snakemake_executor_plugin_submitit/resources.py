"""Snakemake's resources as Slurm's parameters. Pure and strict.

| resource | Slurm |
|---|---|
| `runtime` (minutes) | `--time` |
| `nodes` | `--nodes`; the command runs once, on the first of them |
| `tasks` (of the whole job) | `--ntasks`: room for so many ranks; the command starts them |
| `threads`, or `cpus_per_task` where given | `--cpus-per-task` |
| `mem_mb` (each node), `mem_mb_per_cpu` | `--mem`, `--mem-per-cpu` |
| `gpu` (of the whole job), `gpu_model` | `--gres=gpu[:model]:N` with N = `gpu` / `nodes` |
| `gres` | `--gres`, as given |
| `slurm_partition`, `slurm_account` | `--partition`, `--account` |
| `qos`, `constraint`, `reservation`, also with `slurm_` in front | the option of that name |
| `exclude`, `nodelist` | the option of that name |
| `exclude_file` | its node names, one a line, join `--exclude` when the job is submitted |
| `exclusive` (true, or a text such as `user`) | `--exclusive[=text]` |
| `checkpoint_seconds` | `--signal=B:USR2@N`: warned so early, saved, requeued, resumed |
| `slurm_extra` | further options, `--name[=value] ...` |

An empty text and 0 GPUs mean "not given", so that a config may hold them. A name that is neither
here nor Snakemake's own nor limited by `--resources` is refused.
"""

import difflib
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any

Parameters = dict[str, Any]

_TEXTS = {
    "slurm_partition": "partition",
    "slurm_account": "account",
    "qos": "qos",
    "slurm_qos": "qos",
    "constraint": "constraint",
    "slurm_constraint": "constraint",
}
# Texts that submitit has no parameter for.
_EXTRA_TEXTS = {"reservation": "reservation", "slurm_reservation": "reservation"}
_NODES = ("exclude", "nodelist")
# Numbers: resource -> (submitit's parameter, least value)
_NUMBERS = {"runtime": ("time", 1), "nodes": ("nodes", 1), "cpus_per_task": ("cpus_per_task", 1)}
_OTHERS = ("tasks", "mem_mb", "mem_mb_per_cpu", "gpu", "gpu_model", "gres")
_EXTRAS = ("exclude_file", "exclusive", "checkpoint_seconds", "slurm_extra")
VALID = (*_TEXTS, *_EXTRA_TEXTS, *_NODES, *_NUMBERS, *_OTHERS, *_EXTRAS)

# Names that mean something elsewhere, and what to write here.
_ELSEWHERE = {
    "partition": "slurm_partition",
    "account": "slurm_account",
    "gpus": "gpu",
    "num_gpus": "gpu",
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
    "tasks_per_node": "tasks, of the whole job",
    "mpi": "tasks, and start the ranks by srun inside the command, which runs once",
}
# Snakemake's own names.
_SNAKEMAKE = frozenset({"mem", "mem_mib", "disk", "disk_mb", "disk_mib", "tmpdir", "threads"})
# Options that the executor sets itself, and the resource that sets them where there is one.
_OWN_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("array", "comment", "error", "job-name", "ntasks-per-node", "open-mode"), ""),
    **dict.fromkeys(("output", "parsable", "requeue", "no-requeue", "wait", "wrap", "wckey"), ""),
    **dict.fromkeys(("chdir", "export", "export-file", "test-only"), ""),
    # What leaves us without the job's id, or with another cluster's.
    **dict.fromkeys(("clusters", "quiet", "help", "usage", "version"), ""),
    "signal": "checkpoint_seconds",
    "time": "runtime",
    "nodes": "nodes",
    "ntasks": "tasks",
    "cpus-per-task": "cpus_per_task",
    "mem": "mem_mb",
    "mem-per-cpu": "mem_mb_per_cpu",
    "gpus": "gpu",
    "gres": "gres",
    "partition": "slurm_partition",
    "account": "slurm_account",
    "qos": "qos",
    "constraint": "constraint",
    "reservation": "reservation",
    "exclude": "exclude",
    "nodelist": "nodelist",
    "exclusive": "exclusive",
}
_OPTION = re.compile(r"--([a-z][a-z0-9-]+)(?:=(.*))?", re.DOTALL)
# Slurm warns no earlier before a job's end.
_LONGEST_WARNING = 65535
# A node's name or Slurm's short form of several: n[1-4,7],gpu-01. Linear in the text's length.
_NODE_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[0-9,-]+\][A-Za-z0-9._-]*)*")
_AMONG_NODES = re.compile(r"(?:\[[^\[\]]*\]|[^,])+")


class ResourceError(ValueError):
    """A resource that Slurm cannot be given; the message names it and what is expected."""


def slurm_parameters(
    resources: Mapping[str, Any], threads: int, declared: Collection[str] = ()
) -> Parameters:
    """Submitit's parameters for one job. Jobs with equal parameters may share an array.

    Args:
        resources: the job's resources; names that begin with `_` are Snakemake's counters.
        threads: the job's threads.
        declared: names that the user limits by `--resources`: counters that are not Slurm's.

    Raises:
        ResourceError: a value of the wrong type or range, a contradiction, or an unknown name.
    """
    given = {k: v for k, v in resources.items() if v is not None and v != "" and k[:1] != "_"}
    for name in given:
        _check_name(name, declared)
    parameters: Parameters = {"cpus_per_task": threads}
    for name, (parameter, least) in _NUMBERS.items():
        if name in given:
            parameters[parameter] = _number(name, given[name], least)
    parameters |= _texts(given, _TEXTS)
    for name in _NODES:
        if name in given:
            parameters[name] = ",".join(node_names(given[name], f"resource {name}"))
    _text("exclude_file", given.get("exclude_file", ""))  # read when the job is submitted
    return {**parameters, **_memory(given), **_gpus(given), **_further(given)}


def checkpoint_seconds(resources: Mapping[str, Any]) -> int:
    """Seconds before the time limit at which the job wants to be warned; 0: not at all.

    Raises:
        ResourceError: no whole number, out of range, or no shorter than the time limit.
    """
    value = resources.get("checkpoint_seconds")
    seconds = _number("checkpoint_seconds", 0 if value in (None, "") else value, 0)
    if seconds > _LONGEST_WARNING:
        raise ResourceError(
            f"resource checkpoint_seconds={seconds}: expected at most {_LONGEST_WARNING}"
        )
    runtime = resources.get("runtime")
    if seconds and isinstance(runtime, int) and seconds >= runtime * 60:
        raise ResourceError(
            f"resource checkpoint_seconds={seconds}: expected less than runtime={runtime} minutes"
        )
    return seconds


def node_names(text: Any, where: str) -> list[str]:
    """Node names and short forms, in order, each once; never an option or a shell's word.

    Raises:
        ResourceError: a name that is none; `where` says where it stands.
    """
    if not isinstance(text, str):
        raise ResourceError(f"{where}={text!r}: expected node names")
    names = [name.strip() for name in _AMONG_NODES.findall(text) if name.strip()]
    for name in names:
        if not _NODE_NAMES.fullmatch(name):
            raise ResourceError(f"{where}: {name[:80]!r} is not a node's name")
    return list(dict.fromkeys(names))


def _check_name(name: str, declared: Collection[str]) -> None:
    if name in VALID or name in _SNAKEMAKE or name in declared:
        return
    if name in _ELSEWHERE:
        raise ResourceError(f"resource {name!r} is not known here: give {_ELSEWHERE[name]}")
    near = difflib.get_close_matches(name, VALID, n=1, cutoff=0.75)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ResourceError(
        f"unknown resource {name!r}{hint}; valid: {', '.join(VALID)};"
        f" a counter of your own needs its limit: --resources {name}=N"
    )


def _number(name: str, value: Any, least: int) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise ResourceError(f"resource {name}={value!r}: expected a whole number")
    if value < least:
        raise ResourceError(f"resource {name}={value}: expected at least {least}")
    return int(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ResourceError(f"resource {name}={value!r}: expected a text of one line")
    return value


def _texts(given: Mapping[str, Any], options: Mapping[str, str]) -> Parameters:
    found: Parameters = {}
    for name, option in options.items():
        if name not in given:
            continue
        value = _text(name, given[name])
        if found.setdefault(option, value) != value:
            raise ResourceError(f"resources {option} and {name} differ: keep one")
    return found


def _memory(given: Mapping[str, Any]) -> Parameters:
    if "mem_mb_per_cpu" in given:
        return {"mem_per_cpu": f"{_number('mem_mb_per_cpu', given['mem_mb_per_cpu'], 1)}M"}
    if "mem_mb" in given:
        # 0 asks Slurm for all memory of the node.
        return {"mem": f"{_number('mem_mb', given['mem_mb'], 0)}M"}
    return {}


def _gpus(given: Mapping[str, Any]) -> Parameters:
    count = _number("gpu", given.get("gpu", 0), 0)
    if "gres" in given:
        if count:
            raise ResourceError("resources gpu and gres are both given: keep one")
        return {"gres": _text("gres", given["gres"])}
    if not count:
        return {}
    nodes = _number("nodes", given.get("nodes", 1), 1)
    if count % nodes:
        raise ResourceError(f"resource gpu={count}: cannot be spread evenly over nodes={nodes}")
    model = f"{_text('gpu_model', given['gpu_model'])}:" if "gpu_model" in given else ""
    return {"gres": f"gpu:{model}{count // nodes}"}


def _further(given: Mapping[str, Any]) -> Parameters:
    """Options that submitit has no parameter for go through its `additional_parameters`."""
    extra = _options(_text("slurm_extra", given.get("slurm_extra", "")))
    extra |= _texts(given, _EXTRA_TEXTS)
    if "tasks" in given:
        extra["ntasks"] = _tasks(given)
    if seconds := checkpoint_seconds(given):
        extra["signal"] = f"B:USR2@{seconds}"
    parameters: Parameters = {"additional_parameters": extra} if extra else {}
    if exclusive := given.get("exclusive"):
        text = isinstance(exclusive, str)
        parameters["exclusive"] = _text("exclusive", exclusive) if text else True
    return parameters


def _tasks(given: Mapping[str, Any]) -> int:
    tasks = _number("tasks", given["tasks"], 1)
    nodes = _number("nodes", given.get("nodes", 1), 1)
    if tasks < nodes:
        raise ResourceError(f"resource tasks={tasks}: fewer than nodes={nodes}")
    return tasks


def _options(text: str) -> Parameters:
    options: Parameters = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ResourceError(f"resource slurm_extra={text!r}: {error}") from error
    for word in words:
        match = _OPTION.fullmatch(word)
        if match is None:
            raise ResourceError(f"resource slurm_extra: {word!r} is not --name or --name=value")
        # sbatch takes an abbreviation for the whole name; the shortest is the one itself.
        own = min((name for name in _OWN_OPTIONS if name.startswith(match[1])), key=len, default="")
        if own:
            advice = f": use the resource {_OWN_OPTIONS[own]}" if _OWN_OPTIONS[own] else ""
            raise ResourceError(f"resource slurm_extra: --{own} is set by the executor{advice}")
        options[match[1]] = True if match[2] is None else match[2]
    return options
