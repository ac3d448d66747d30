"""The GPUs that a process sees, out of those that its job has on the node."""

from collections.abc import Mapping, Sequence

from shakedown.core.errors import UsageError

# GPUs of a rank's node, counted from 0, as `4,5`; set by the launcher for the ranks. On another
# node it is applied there, as Slurm sets CUDA_VISIBLE_DEVICES again for each step.
GPUS = "SHAKEDOWN_GPUS"
# Values that hide all GPUs: CUDA takes an empty text and -1 for none; Slurm may write NoDevFiles
# for a job without GPUs.
_HIDDEN = ("", "-1", "NoDevFiles")


def wanted_gpus(gpus: Sequence[int]) -> dict[str, str]:
    """The variable with the GPUs that a node gives to the ranks; empty without GPUs."""
    return {GPUS: ",".join(map(str, gpus))} if gpus else {}


def visible_gpus(wanted: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for `wanted[SHAKEDOWN_GPUS]`, out of the GPUs that `environ` shows.

    Empty if none are wanted, or GPUs are hidden on purpose.

    Raises:
        UsageError: the job shows fewer.
    """
    if not wanted.get(GPUS):
        return {}
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown in _HIDDEN:
        return {}
    numbers = [int(number) for number in wanted[GPUS].split(",")]
    if shown is None:
        return {"CUDA_VISIBLE_DEVICES": wanted[GPUS]}
    # Names, not numbers: CUDA_VISIBLE_DEVICES may hold UUIDs.
    names = [name.strip() for name in shown.split(",")]
    if max(numbers) >= len(names):
        raise UsageError(
            f"GPUs {wanted[GPUS]} are wanted, but CUDA_VISIBLE_DEVICES={shown} shows {len(names)}",
            hint="set cluster.gpus_per_node to the job's (scontrol show job $SLURM_JOB_ID), and "
            "remove --gpus-per-task and --gpu-bind, which show a rank only one GPU, from srun_args",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in numbers)}


def device_number(environ: Mapping[str, str], visible: int) -> int:
    """The number of this rank's GPU among the `visible` ones.

    Raises:
        UsageError: the node has more ranks than GPUs.
    """
    local = int(environ["LOCAL_RANK"])
    # With --gpus-per-task or --gpu-bind Slurm shows each task only its own GPU, as number 0.
    if visible == 1 and environ.get("SLURM_LOCALID") == environ["LOCAL_RANK"]:
        return 0
    if local >= visible:
        raise UsageError(
            f"rank {local} of this node has no GPU: {visible} are visible "
            f"(CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')})",
            hint="match cluster.gpus_per_node and the allocation to what the node has",
        )
    return local
