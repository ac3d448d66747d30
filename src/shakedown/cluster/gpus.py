"""Which GPUs a process sees: some of those that its node's job has."""

from collections.abc import Mapping, Sequence

from shakedown.core.errors import UsageError

# GPUs of a rank's node, from 0, as `4,5`; the launcher's word to the ranks. On another node it is
# applied there: Slurm sets CUDA_VISIBLE_DEVICES anew for each step.
GPUS = "SHAKEDOWN_GPUS"
# How GPUs are hidden: CUDA takes an empty text and -1 for none; Slurm may write NoDevFiles for a
# job without GPUs.
_HIDDEN = ("", "-1", "NoDevFiles")


def wanted_gpus(gpus: Sequence[int]) -> dict[str, str]:
    """The variable that says which GPUs a rank's node gives to the ranks; empty without GPUs."""
    return {GPUS: ",".join(map(str, gpus))} if gpus else {}


def visible_gpus(wanted: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for `wanted[SHAKEDOWN_GPUS]`, out of those that `environ` shows.

    Empty when nothing is wanted, or GPUs are hidden on purpose.

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
            hint="make cluster.gpus_per_node what the job has (scontrol show job $SLURM_JOB_ID), "
            "and leave --gpus-per-task and --gpu-bind, by which a rank sees one, out of srun_args",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in numbers)}


def device_number(environ: Mapping[str, str], visible: int) -> int:
    """The number of this rank's GPU among the `visible` ones.

    Raises:
        UsageError: the node's ranks are more than its GPUs.
    """
    local = int(environ["LOCAL_RANK"])
    # By --gpus-per-task or --gpu-bind Slurm shows each of its tasks its own GPU alone, as number 0.
    if visible == 1 and environ.get("SLURM_LOCALID") == environ["LOCAL_RANK"]:
        return 0
    if local >= visible:
        raise UsageError(
            f"rank {local} of this node has no GPU: {visible} are visible "
            f"(CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')})",
            hint="make cluster.gpus_per_node and the allocation what the node has",
        )
    return local
