"""The nodes that srun and Slurm's controller themselves blame. Pure.

Their messages come before our own inferences: a lost node explains the failures beside it, and
tasks that srun ends because of it are nobody's fault.
"""

import re

from shakedown.core.errors import UsageError
from shakedown.slurm.hostlist import expand_nodelist, is_node_name

_BLAME = (
    # slurm 22.05, src/api/step_launch.c
    re.compile(r"Task launch for \S+ failed on node (?P<node>\S+): (?P<why>.*)"),
    re.compile(r"(?P<why>Node failure) on (?P<node>\S+)"),
    # src/common/slurm_protocol_api.c
    re.compile(r"slurm_receive_msgs: \[\[(?P<node>[^\]]+)\]:\d+\] failed: (?P<why>.*)"),
)
_ABORT = re.compile(
    r"Job step aborted|Force Terminated|Application launch failed|Unable to create step"
    r"|STEP \S+ ON \S+ CANCELLED|step creation|Job step creation"
)
_TASK_END = re.compile(
    r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): "
    r"(?P<why>(?:Killed|Terminated|Aborted|Exited with|Segmentation|Bus error|Illegal|Floating).*)"
)


def blamed_by_srun(text: str) -> dict[str, str]:
    """Node -> srun's own message about its failure."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        for pattern in _BLAME:
            match = pattern.search(line)
            if match and is_node_name(match["node"]):
                found.setdefault(match["node"], f"srun: {match[0].strip()[:200]}")
    return found


def was_aborted(text: str) -> bool:
    """Whether srun ended the whole step or never started it."""
    return _ABORT.search(text) is not None


def tasks_that_ended(text: str) -> dict[str, str]:
    """Node -> how its task ended by itself; empty if srun ended all of them."""
    if was_aborted(text):
        return {}
    return {
        node: f"its task ended: {match['why'].strip()[:200]}"
        for match in _TASK_END.finditer(text)
        for node in _nodes(match["node"])
    }


def _nodes(text: str) -> list[str]:
    """The nodes named; srun groups nodes of similar tasks: `n[1-2]`."""
    try:
        return expand_nodelist(text)
    except UsageError:
        return []
