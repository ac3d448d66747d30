"""Snakemake's resources as Slurm's parameters. Pure and strict.

| resource | Slurm |
|---|---|
| `runtime` (minutes) | `--time` |
| `nodes` | `--nodes`; the command runs once, on the first of them |
| `threads`, or `cpus_per_task` where given | `--cpus-per-task`, on every node |
| `mem_mb` (each node), `mem_mb_per_cpu` | `--mem`, `--mem-per-cpu` |
| `gpu` (of the whole job), `gpu_model` | `--gres=gpu[:model]:N` with N = `gpu` / `nodes` |
| `gres` | `--gres`, as given |
| `slurm_partition`, `slurm_account` | `--partition`, `--account` |
| `qos`, `constraint`, `exclude`, `nodelist`, `reservation` | the option of that name |
| `exclusive` | `--exclusive` |
| `slurm_extra` | further options, `--name[=value] ...` |

An empty text and 0 GPUs mean "not given", so that a config may hold them. Other names are
Snakemake's own business, unless they look like a slip of one of these.
"""

import difflib
import re
import shlex
from collections.abc import Mapping
from typing import Any

Parameters = dict[str, Any]

_TEXTS = {
    "slurm_partition": "partition",
    "slurm_account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "exclude": "exclude",
    "nodelist": "nodelist",
}
# Numbers: resource -> (submitit's parameter, least value)
_NUMBERS = {"runtime": ("time", 1), "nodes": ("nodes", 1), "cpus_per_task": ("cpus_per_task", 1)}
_OTHERS = ("mem_mb", "mem_mb_per_cpu", "gpu", "gpu_model", "gres")
_EXTRAS = ("exclusive", "reservation", "slurm_extra")
VALID = (*_TEXTS, *_NUMBERS, *_OTHERS, *_EXTRAS)

# Names that mean something elsewhere, and what to write here.
_ELSEWHERE = {
    "partition": "slurm_partition",
    "account": "slurm_account",
    "gpus": "gpu",
    "num_gpus": "gpu",
    "gpus_per_node": "gpu",
    "slurm_gres": "gres",
    "slurm_qos": "qos",
    "slurm_constraint": "constraint",
    "time": "runtime",
    "time_min": "runtime",
    "timeout_min": "runtime",
    "walltime": "runtime",
    "mem_gb": "mem_mb",
    "num_nodes": "nodes",
    "slurm_nodes": "nodes",
    "tasks": "nodes, and start the ranks by srun inside the command, which runs once",
    "ntasks": "nodes, and start the ranks by srun inside the command, which runs once",
    "tasks_per_node": "nodes, and start the ranks by srun inside the command, which runs once",
    "mpi": "nodes, and start the ranks by srun inside the command, which runs once",
}
# Snakemake's own names that resemble one of ours.
_SNAKEMAKE = frozenset({"mem", "mem_mib", "disk", "disk_mb", "disk_mib", "tmpdir", "threads"})
# Options that the executor sets itself.
_OWN_OPTIONS = frozenset(
    {"array", "comment", "error", "job-name", "ntasks", "ntasks-per-node", "open-mode", "output"}
    | {"parsable", "requeue", "no-requeue", "wait", "wrap", "wckey"}
)
_OPTION = re.compile(r"--([a-z][a-z0-9-]+)(?:=(.*))?", re.DOTALL)


class ResourceError(ValueError):
    """A resource that Slurm cannot be given; the message names it and what is expected."""


def slurm_parameters(resources: Mapping[str, Any], threads: int) -> Parameters:
    """Submitit's parameters for one job. Jobs with equal parameters may share an array.

    Args:
        resources: the job's resources; names that begin with `_` are Snakemake's counters.
        threads: the job's threads.

    Raises:
        ResourceError: a value of the wrong type or range, a contradiction, or a mistaken name.
    """
    given = {k: v for k, v in resources.items() if v is not None and v != "" and k[:1] != "_"}
    for name in given:
        _check_name(name)
    parameters: Parameters = {"cpus_per_task": threads}
    for name, (parameter, least) in _NUMBERS.items():
        if name in given:
            parameters[parameter] = _number(name, given[name], least)
    for name, parameter in _TEXTS.items():
        if name in given:
            parameters[parameter] = _text(name, given[name])
    return {**parameters, **_memory(given), **_gpus(given), **_further(given)}


def _check_name(name: str) -> None:
    if name in VALID or name in _SNAKEMAKE:
        return
    if name in _ELSEWHERE:
        raise ResourceError(f"resource {name!r} is not known here: give {_ELSEWHERE[name]}")
    near = difflib.get_close_matches(name, VALID, n=1, cutoff=0.85)
    if near or name.startswith("slurm_"):
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ResourceError(f"unknown resource {name!r}{hint}; valid: {', '.join(VALID)}")


def _number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ResourceError(f"resource {name}={value!r}: expected a whole number")
    if value < least:
        raise ResourceError(f"resource {name}={value}: expected at least {least}")
    return int(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or "\n" in value:
        raise ResourceError(f"resource {name}={value!r}: expected a text of one line")
    return value


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
    if "reservation" in given:
        extra["reservation"] = _text("reservation", given["reservation"])
    parameters: Parameters = {"additional_parameters": extra} if extra else {}
    if given.get("exclusive"):
        parameters["exclusive"] = True
    return parameters


def _options(text: str) -> dict[str, str | bool]:
    options: dict[str, str | bool] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ResourceError(f"resource slurm_extra={text!r}: {error}") from error
    for word in words:
        match = _OPTION.fullmatch(word)
        if match is None:
            raise ResourceError(f"resource slurm_extra: {word!r} is not --name or --name=value")
        if match[1] in _OWN_OPTIONS:
            raise ResourceError(f"resource slurm_extra: --{match[1]} is set by the executor")
        options[match[1]] = True if match[2] is None else match[2]
    return options
