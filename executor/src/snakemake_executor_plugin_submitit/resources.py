"""Snakemake's resources as Slurm's parameters, by the table of docs/further.md. Pure and strict."""

from typing import Any

from snakemake_executor_plugin_submitit.request import JobRequest
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


def slurm_parameters(asked: JobRequest) -> Parameters:
    """Submitit's parameters for one job. Jobs with equal parameters may share an array.

    `additional_parameters` holds options that submitit has no parameter for; with `no-requeue`
    in it no `requeue` may be added. `extra`: words that stand last on sbatch's command line.

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
        name: given[name] for name in ("reservation", "clusters") if name in given
    }
    if given.get("requeue") is False:
        further["no-requeue"] = True
    if seconds := checkpoint_seconds(asked):
        further["signal"] = f"B:USR2@{seconds}"
    if asked.extra.signal:
        further["signal"] = asked.extra.signal
    if asked.extra.words:
        parameters["extra"] = list(asked.extra.words)
    for part in (_cpus(asked), _memory(asked), _gpu_options(asked), _layout(asked)):
        further |= part.pop("additional_parameters", {})
        parameters |= part
    return {**parameters, "additional_parameters": further} if further else parameters


def checkpoint_seconds(asked: JobRequest) -> int:
    """Seconds before the time limit at which the job wants to be warned; 0: not at all."""
    return int(asked.resources.get("checkpoint_seconds", 0))


def _cpus(asked: JobRequest) -> Parameters:
    given = asked.resources
    if "cpus-per-gpu" in asked.extra.names:  # sbatch takes one of both
        return {}
    if "cpus_per_task" in given:
        cpus = given["cpus_per_task"]
        return {} if cpus < 0 else {"cpus_per_task": max(1, cpus)}
    if "cpus_per_gpu" in given and asked.is_gpu_job:
        cpus = given["cpus_per_gpu"]
        return {"additional_parameters": {"cpus-per-gpu": cpus}} if cpus > 0 else {}
    return {"cpus_per_task": asked.threads}


def _memory(asked: JobRequest) -> Parameters:
    given = asked.resources
    if asked.extra.names & {"mem", "mem-per-cpu", "mem-per-gpu"}:  # sbatch takes one of them
        return {}
    if given.get("mem_mb_per_cpu"):
        return {"mem_per_cpu": f"{given['mem_mb_per_cpu']}M"}
    # 0 asks Slurm for all memory of the node.
    return {"mem": f"{given['mem_mb']}M"} if "mem_mb" in given else {}


def _gpu_options(asked: JobRequest) -> Parameters:
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
    # --gres counts on each node, --gpus over the whole job, of whose nodes Slurm finds the number.
    if count % nodes or ("nodes" not in given and given.get("mpi")):
        return {**others, "additional_parameters": {"gpus": f"{kind}{count}"}}
    return {"gres": f"{gres}{',' if gres else ''}gpu:{kind}{count // nodes}"}


def _layout(asked: JobRequest) -> Parameters:
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
    # Without `nodes` Slurm takes as many as the tasks need.
    parameters: Parameters = {"nodes": given["nodes"]} if "nodes" in given else {}
    return {**parameters, "additional_parameters": further}


def _whole(asked: JobRequest) -> int:
    """Tasks of the whole job; 0: not said."""
    if asked.is_gpu_job and ("nodes" not in asked.resources or _per_gpu(asked)):
        return 0
    return int(asked.resources.get("tasks", 0))


def _per_gpu(asked: JobRequest) -> int:
    """Tasks of each GPU; 0: not said."""
    given = asked.resources
    if not asked.is_gpu_job:
        return 0
    if "tasks_per_gpu" in given:
        return max(0, int(given["tasks_per_gpu"]))
    return 0 if "nodes" in given else int(given.get("tasks", 0))
