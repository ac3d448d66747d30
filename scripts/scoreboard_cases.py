"""The scoreboard's cases, each with the truth, and how a diagnosis is judged. Pure."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outside = Literal["", "kill server", "stop server", "sample"]
FIRST_STEP, LAST_STEP = 4, 9  # a few ordinary steps before: the watch and the rules learn them


@dataclass(frozen=True)
class Case:
    """One fault and what a diagnosis should say of it.

    Attributes:
        causes: the true cause, and others that are as right.
        kind: of the injected fault; empty: none.
        culprit: who a diagnosis should name: the rank that the fault is drawn for, a role, nobody.
        algorithm: of the stage: sft on 4 ranks; grpo on 2, with orchestrator and server.
        outside: what is done to the run from outside, once it trains.
        changes: to the stage's config.
        engine_args: of the inference server.
        only_ranks: ranks to draw from; empty: all.
    """

    name: str
    causes: tuple[str, ...]
    kind: str = ""
    culprit: Literal["rank", "orchestrator", "inference", "nobody"] = "rank"
    algorithm: Literal["sft", "grpo"] = "sft"
    outside: Outside = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    engine_args: tuple[str, ...] = ()
    only_ranks: tuple[int, ...] = ()


_ARCHON = {"allocation": "archon:d2p2", "micro_batch_size": 2}
_MEGATRON = {"allocation": "megatron:d2p2", "micro_batch_size": 2}
_START = {"start_timeout": 40.0}
# A checkpoint has the patience of the start.
_CHECKPOINTS = {"checkpoint_every": 2, "start_timeout": 60.0}
_SYNCHRONOUS = {"grpo": {"async_level": 0}}
_HEALTHY = ("healthy", "slow_not_hung")

CASES: tuple[Case, ...] = (
    Case("exception swallowed by cleanup", ("exception_in_cleanup",), "exception_in_cleanup"),
    Case("conditional collective", ("conditional_collective",), "conditional_collective"),
    Case("op mismatch", ("collective_mismatch",), "op_mismatch"),
    Case("size mismatch", ("size_mismatch",), "size_mismatch"),
    Case("uneven batches", ("uneven_inputs",), "out_of_data"),
    Case("data loader silent", ("dataloader",), "dataloader"),
    Case("data loader deadlock", ("dataloader",), "dataloader_worker"),
    Case("busy rank", ("rank_busy",), "busy_rank"),
    Case("garbage collection", ("rank_busy",), "long_collection"),
    Case("stopped rank", ("missing_rank",), "stop_rank"),
    Case("killed rank", ("missing_rank",), "kill_rank"),
    Case("rank never joins", ("init_deadlock",), "no_rendezvous", changes=_START),
    Case("rank stuck loading", ("init_deadlock", "missing_rank"), "model_load", changes=_START),
    Case("two threads, one group", ("two_threads_one_group",), "two_threads"),
    Case("cross-group order", ("cross_group_cycle",), "cross_group_order"),
    Case("file system stalls", ("storage",), "storage_stall", changes=_CHECKPOINTS),
    Case("pipeline stage killed", ("missing_rank",), "kill_rank", changes=_ARCHON),
    Case("pipeline stage left", ("exception_in_cleanup",), "exception_in_cleanup", changes=_ARCHON),
    Case(
        "pipeline micro batch",
        ("pipeline_order", "uneven_inputs"),
        "fewer_micro_batches",
        changes=_ARCHON,
    ),
    Case("pipeline shape", ("pipeline_shape_mismatch",), "wrong_shape", changes=_ARCHON),
    Case(
        "pipeline micro batch, megatron",
        ("pipeline_order", "uneven_inputs"),
        "fewer_micro_batches",
        changes=_MEGATRON,
    ),
    Case(
        "pipeline shape, megatron", ("pipeline_shape_mismatch",), "wrong_shape", changes=_MEGATRON
    ),
    Case("dead orchestrator", ("rollout_starvation",), "kill_orchestrator", "orchestrator", "grpo"),
    Case(
        "stopped orchestrator", ("rollout_starvation",), "stop_orchestrator", "orchestrator", "grpo"
    ),
    Case("dead server", ("server_unhealthy",), "", "inference", "grpo", "kill server"),
    Case("stopped server", ("server_unhealthy",), "", "inference", "grpo", "stop server"),
    Case(
        "weights never loaded",
        ("weight_sync_one_sided",),
        "weights_not_loaded",
        "orchestrator",
        "grpo",
        changes=_SYNCHRONOUS,
    ),
    Case(
        "server hangs in update",
        ("weight_sync_one_sided", "server_unhealthy"),
        "",
        "inference",
        "grpo",
        engine_args=("--hang-at-update", "5"),
        changes=_SYNCHRONOUS,
    ),
    Case(
        "staleness capacity zero",
        ("staleness_capacity",),
        "staleness_zero",
        "orchestrator",
        "grpo",
        changes=_SYNCHRONOUS,
    ),
    Case("healthy", _HEALTHY, "", "nobody", outside="sample"),
    Case("slow", _HEALTHY, "slow_steps", "nobody", outside="sample"),
    Case("finished", _HEALTHY, "", "nobody", changes={"steps": 8}),
    Case("finished, grpo", _HEALTHY, "", "nobody", "grpo", changes={"steps": 4}),
)


@dataclass(frozen=True)
class Drawn:
    """Where a case strikes in this run."""

    rank: int
    step: int


def draw(case: Case, seed: int) -> Drawn:
    """Rank and step of a case: the same for the same seed, whatever other cases run."""
    chance = random.Random(f"{seed} {case.name}")
    world = 4 if case.algorithm == "sft" else 2
    return Drawn(
        chance.choice(case.only_ranks or tuple(range(world))),
        chance.randint(FIRST_STEP, LAST_STEP),
    )


@dataclass(frozen=True)
class Result:
    """One case's verdict.

    Attributes:
        state: of the stage's outcome; empty: the stage was still running.
        seconds: from the stall timeout, or where the stage ended by itself from the fault, to
            the written diagnosis; None: neither was seen.
    """

    case: str
    rank: int
    step: int
    truth: str
    culprit: str
    state: str
    cause: str
    ranks: tuple[int, ...]
    roles: tuple[str, ...]
    nodes: tuple[str, ...]
    cause_right: bool
    exact: bool
    false_blame: bool
    seconds: float | None
    sentence: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    case: Case,
    drawn: Drawn,
    diagnosis: Mapping[str, Any],
    *,
    state: str,
    sentence: str,
    seconds: float | None,
) -> Result:
    """Compare the `diagnosis` of a diagnosis.json with the truth.

    Exact: precisely the culprit are named. False blame: an innocent rank, role or node is named.
    """
    named = diagnosis["culprits"]
    ranks, roles, nodes = (tuple(named[key]) for key in ("ranks", "roles", "nodes"))
    true_ranks = {drawn.rank} if case.culprit == "rank" else set()
    true_roles = {case.culprit} if case.culprit in ("orchestrator", "inference") else set()
    innocent = set(ranks) - true_ranks or set(roles) - true_roles or nodes
    return Result(
        case=case.name,
        rank=drawn.rank,
        step=drawn.step,
        truth=case.causes[0],
        culprit=f"rank {drawn.rank}" if case.culprit == "rank" else case.culprit,
        state=state,
        cause=diagnosis["cause"],
        ranks=ranks,
        roles=roles,
        nodes=nodes,
        cause_right=diagnosis["cause"] in case.causes,
        exact=(set(ranks), set(roles), set(nodes)) == (true_ranks, true_roles, set()),
        false_blame=bool(innocent),
        seconds=seconds,
        sentence=sentence,
    )


def confusion(results: Sequence[Result]) -> Counter[tuple[str, str]]:
    """How often each true cause was diagnosed as what; a right other name counts as right."""
    return Counter((r.truth, r.truth if r.cause_right else r.cause) for r in results)
