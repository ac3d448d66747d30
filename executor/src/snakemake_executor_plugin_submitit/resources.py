"""Snakemake's resources as Slurm's parameters. Pure and strict.

| resource | Slurm |
|---|---|
| `runtime` (minutes; 0: the partition's limit) | `--time` |
| `nodes` | `--nodes`; the command runs once, on the first of them |
| `tasks` | `--ntasks` of the whole job, at least one a node; without `nodes` over as many nodes as needed. In a GPU job without `nodes`: of each GPU, `--ntasks-per-gpu` |
| `tasks_per_node` | `--ntasks-per-node` |
| `tasks_per_gpu` | `--ntasks-per-gpu`, in a GPU job; outranks `tasks` and `tasks_per_node` |
| `mpi` (any text, true) | needs one of `tasks` and `tasks_per_node`; the command, run once, starts the ranks |
| `threads`, or `cpus_per_task` where given (0: 1; negative: no option) | `--cpus-per-task` |
| `cpus_per_gpu` (0 and negative: no option) | `--cpus-per-gpu` instead, in a GPU job |
| `mem_mb` (each node; 0: all), `mem_mb_per_cpu` where given | `--mem`, `--mem-per-cpu` |
| `gpu` (of the whole job), `gpu_model` (alone: one GPU) | `--gres=gpu[:model]:N`, N = `gpu` / `nodes`; `--gpus` where that is no whole number, and with `mpi` without `nodes` |
| `gres` | `--gres`; beside `gpu` when it names no GPU itself |
| `slurm_partition`, `slurm_account` | `--partition`, `--account`; of several accounts the first valid one |
| `qos`, `constraint`, `reservation`, also with `slurm_` in front | the option of that name |
| `clusters`, `cluster`, `slurm_cluster` | `--clusters` |
| `exclude`, `nodelist` | the option of that name |
| `exclude_file` | its node names, one a line, join `--exclude` when the job is submitted |
| `node_file` | its node names, one a line, are the only ones for the job, where they are enough |
| `exclusive` (true, or a text such as `user`) | `--exclusive[=text]` |
| `requeue` (false) | `--no-requeue` |
| `checkpoint_seconds` | `--signal=B:USR2@N`: warned so early, saved, requeued, resumed |
| `slurm_extra` | further options, see `extra` |
| `mpi_tasks`, `threads` among the resources | nothing; they count in the choice of a partition |
| `mem`, `disk`, `disk_mb`, `tmpdir`, `gpu_manufacturer` | nothing: Snakemake's own |
| any other | nothing: a counter of the workflow's own |

An empty text and 0 GPUs mean "not given", so that a config may hold them. Numbers may be texts and
texts numbers. A resource outranks a setting.
"""  # noqa: E501  # a row of a table is one line

from collections.abc import Mapping
from typing import Any

from snakemake_executor_plugin_submitit.request import Request
from snakemake_executor_plugin_submitit.values import ResourceError, node_names

__all__ = [
    "Parameters",
    "ResourceError",
    "checkpoint_seconds",
    "node_names",
    "slurm_parameters",
]

Parameters = dict[str, Any]

# Resources that are submitit's parameters as they are.
_PARAMETERS = {
    "slurm_partition": "partition",
    **{name: name for name in ("qos", "constraint", "exclude", "nodelist", "exclusive")},
}


def slurm_parameters(asked: Request) -> Parameters:
    """Submitit's parameters for one job. Jobs with equal parameters may share an array.

    `additional_parameters` holds options that submitit has no parameter for; with `no-requeue`
    in it no `requeue` may be added.

    Raises:
        ResourceError: GPUs in two ways.
    """
    given = asked.resources
    parameters = {to: given[name] for name, to in _PARAMETERS.items() if name in given}
    if given.get("runtime"):
        parameters["time"] = given["runtime"]
    if asked.accounts:
        parameters["account"] = asked.accounts[0]
    further: Parameters = {
        **asked.options,
        **{name: given[name] for name in ("reservation", "clusters") if name in given},
    }
    if given.get("requeue") is False:
        further["no-requeue"] = True
    if seconds := checkpoint_seconds(asked):
        further["signal"] = f"B:USR2@{seconds}"
    for part in (_cpus(asked), _memory(given), _gpu_options(asked), _layout(asked)):
        further |= part.pop("additional_parameters", {})
        parameters |= part
    return {**parameters, "additional_parameters": further} if further else parameters


def checkpoint_seconds(asked: Request) -> int:
    """Seconds before the time limit at which the job wants to be warned; 0: not at all."""
    return int(asked.resources.get("checkpoint_seconds", 0))


def _cpus(asked: Request) -> Parameters:
    given = asked.resources
    if "cpus_per_task" in given:
        cpus = given["cpus_per_task"]
        return {} if cpus < 0 else {"cpus_per_task": max(1, cpus)}
    if "cpus_per_gpu" in given and asked.is_gpu_job:
        cpus = given["cpus_per_gpu"]
        return {"additional_parameters": {"cpus-per-gpu": cpus}} if cpus > 0 else {}
    return {"cpus_per_task": asked.threads}


def _memory(given: Mapping[str, Any]) -> Parameters:
    if given.get("mem_mb_per_cpu"):
        return {"mem_per_cpu": f"{given['mem_mb_per_cpu']}M"}
    # 0 asks Slurm for all memory of the node.
    return {"mem": f"{given['mem_mb']}M"} if "mem_mb" in given else {}


def _gpu_options(asked: Request) -> Parameters:
    given = asked.resources
    gres = given.get("gres", "")
    if "gpu" in gres:
        if given.get("gpu"):
            raise ResourceError("resources gpu and gres, which names GPUs too: keep one")
        return {"gres": gres}
    count, model = asked.gpus
    others = {"gres": gres} if gres else {}
    if not count:
        return others
    kind = f"{model}:" if model else ""
    nodes = given.get("nodes", 1)
    # --gres counts on each node, --gpus over the whole job.
    if count % nodes or _spreads(asked):
        return {**others, "additional_parameters": {"gpus": f"{kind}{count}"}}
    return {"gres": f"{gres}{',' if gres else ''}gpu:{kind}{count // nodes}"}


def _layout(asked: Request) -> Parameters:
    """Nodes, and tasks over them."""
    given = asked.resources
    further: Parameters = {}
    whole, per_gpu = _whole(asked), _per_gpu(asked)
    if whole:
        further["ntasks"] = max(whole, given.get("nodes", 1))
    if per_gpu:
        further["ntasks-per-gpu"] = per_gpu
    elif given.get("tasks_per_node"):
        further["ntasks-per-node"] = given["tasks_per_node"]
    parameters: Parameters = {"nodes": given["nodes"]} if "nodes" in given else {}
    if _spreads(asked):
        # Submitit always asks for nodes: as many as needed, which is what Slurm does by itself.
        most = whole or asked.gpus[0] * max(1, per_gpu)
        further |= {"nodes": f"1-{most}", "use-min-nodes": True}
    return {**parameters, "additional_parameters": further}


def _whole(asked: Request) -> int:
    """Tasks of the whole job; 0: not said."""
    given = asked.resources
    if asked.is_gpu_job and ("nodes" not in given or _per_gpu(asked)):
        return asked.ntasks
    return asked.ntasks or int(given.get("tasks", 0))


def _per_gpu(asked: Request) -> int:
    """Tasks of each GPU; 0: not said."""
    given = asked.resources
    if not asked.is_gpu_job:
        return 0
    if "tasks_per_gpu" in given:
        return max(0, int(given["tasks_per_gpu"]))
    return 0 if "nodes" in given else int(given.get("tasks", 0))


def _spreads(asked: Request) -> bool:
    """Whether Slurm is to find out how many nodes the tasks need."""
    given = asked.resources
    if "nodes" in given:
        return False
    if asked.is_gpu_job:
        return bool(given.get("mpi")) and "gpu" not in given.get("gres", "")
    return _whole(asked) > 1
