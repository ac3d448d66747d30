"""The table of causes, and the one function that makes a hypothesis of what a rule found."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shakedown.core.verdict import Blame
from shakedown.diagnosis.analyze.graph import Block
from shakedown.diagnosis.analyze.model import Cause, Hypothesis, Pattern, State
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.records import SourceRef

Strength = Literal["told", "seen", "likely", "open"]
# How often a reading of that strength is right: docs/hang.md, measured by scripts/corpus.py.
CONFIDENCE: Mapping[Strength, float] = {
    "told": 0.9,  # an end, an error or a state says so; or counters and frames agree
    "seen": 0.8,  # one kind of evidence shows it: a rank's own history, a stack
    "likely": 0.7,  # it fits, and little else does
    "open": 0.55,  # what happened fits; why or who is open
}


@dataclass(frozen=True)
class CauseRow:
    """What to do about a cause, whose fault it is, and which of the guides' patterns it is."""

    remedy: str
    blame: Blame = "code"
    pattern: Pattern | None = None


_SAME_BRANCH = "make every rank of the group take the same branch before this call"
_PREFLIGHT = "run `shakedown preflight` on these nodes"
TABLE: Mapping[Cause, CauseRow] = {
    "missing_rank": CauseRow(
        "see what the missing rank does: its stack, its log, its GPU's error counters"
    ),
    "exception_in_cleanup": CauseRow(
        "let a rank that fails abort the process group instead of waiting in cleanup", pattern="A"
    ),
    "collective_mismatch": CauseRow(_SAME_BRANCH, pattern="B"),
    "conditional_collective": CauseRow(_SAME_BRANCH, pattern="B"),
    "size_mismatch": CauseRow(
        "compare the sizes that the ranks pass to this call: pad them, or exchange them before",
        pattern="B",
    ),
    "dtype_mismatch": CauseRow(
        "cast the tensor to one dtype on all ranks before this call: see autocast, and defaults "
        "that some ranks alone take",
        pattern="B",
    ),
    "pipeline_shape_mismatch": CauseRow(
        "compare the output shape of the sending stage with its neighbour's input"
    ),
    "pipeline_order": CauseRow("give all stages of a pipeline the same number of micro-batches"),
    "uneven_inputs": CauseRow(
        "give every rank the same number of batches: drop the last ones or pad"
    ),
    "dataloader": CauseRow(
        "see the loader worker's stack; check the sample, the storage and the worker count"
    ),
    "rank_busy": CauseRow("move the long host work off this rank"),
    "init_deadlock": CauseRow(
        "see what the missing rank does before init_process_group; raise nothing, wait less"
    ),
    "storage": CauseRow(
        "check the mount on its node; D state ends only when the storage answers", "environment"
    ),
    "node_dead": CauseRow("exclude the node and start the stage again from its checkpoint", "node"),
    "network": CauseRow(_PREFLIGHT, "link", "C"),
    "nccl_internal": CauseRow(f"{_PREFLIGHT}; try another NCCL version", "environment", "C"),
    "cross_group_cycle": CauseRow("let all ranks use their groups in one order", pattern="B"),
    "two_threads_one_group": CauseRow("give each thread a process group of its own"),
    "host_sync_divergence": CauseRow(
        "look for a call that synchronises on some ranks alone (.item(), prints, logging)"
    ),
    "rollout_starvation": CauseRow(
        "read the orchestrator's log and stack; check that both sides use the same output folder"
    ),
    "weight_sync_one_sided": CauseRow(
        "check that trainer and engine agree on the weight version, the folder and the group's size"
    ),
    "server_unhealthy": CauseRow(
        "read the server's log; start it again and resume from the checkpoint", "environment"
    ),
    "staleness_capacity": CauseRow("raise the allowed staleness or the concurrency"),
    "user_code": CauseRow("mend the code at that line, then start the stage again"),
    "diverged": CauseRow(
        "lower the learning rate or warm up longer, then start the stage again from its checkpoint",
        "user",
    ),
    "out_of_memory": CauseRow(
        "see what grows: batch and sequence length, other processes on the device, host buffers; "
        "then start the stage again from its checkpoint",
        "environment",
    ),
    "gpu_error": CauseRow(
        "see `nvidia-smi -q` and dmesg of its node, and start again without it", "environment"
    ),
    "slow_not_hung": CauseRow("find what makes the steps long, or raise stall_timeout", "none"),
    "healthy": CauseRow("", "none"),
    "unknown": CauseRow("", "none"),
}


def conclude(
    s: Situation,
    cause: Cause,
    says: str,
    *,
    sure: Strength,
    ranks: Collection[int] = (),
    nodes: Collection[str] = (),
    roles: Collection[str] = (),
    evidence: Sequence[SourceRef] = (),
    needed: Sequence[str] = (),
    waits: Sequence[Block] = (),
    state: State | None = None,
    remedy: str = "",
    blame: Blame | None = None,
) -> Hypothesis:
    """A hypothesis with all that follows from its cause and its culprits.

    Victims are all other ranks of the job. `waits`: who waits for whom, where the situation's own
    graph does not have it. `state`: hung or ended as the evidence shows, unless given. `remedy` and
    `blame`: where the cause's own row does not fit.
    """
    row = TABLE[cause]
    return Hypothesis(
        cause,
        says,
        ranks=sorted(ranks),
        nodes=sorted(nodes),
        roles=sorted(roles),
        victims=sorted(s.expected_ranks.difference(ranks)) if row.blame != "none" else (),
        pattern=row.pattern,
        confidence=CONFIDENCE[sure] if cause != "unknown" else 0.0,
        evidence=evidence,
        needed=needed,
        waits=waits,
        state=s.end_state if state is None else state,
        remedy=remedy or row.remedy,
        blame=row.blame if blame is None else blame,
    )
