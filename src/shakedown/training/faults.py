"""Faults to inject, by name; imports without torch. Their acts: `fault_acts`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from shakedown.config import FaultConfig
from shakedown.core.errors import ConfigError, look_up
from shakedown.training import fault_acts as acts
from shakedown.training.fault_acts import DataEndedError, Strike, SwallowedError

__all__ = [
    "KINDS",
    "DataEndedError",
    "FaultPlace",
    "InjectedFault",
    "Injector",
    "Role",
    "Strike",
    "SwallowedError",
    "check_kind",
]

# Where a fault strikes. Of a trainer rank: before the rendezvous, before its model is loaded,
# before a step's work, in the fetching of its batch, in its logging. Of the orchestrator: before
# it hands out a step's batch, before it loads new weights into the server.
FaultPlace = Literal["join", "load", "step", "data", "metrics", "rollout", "weights"]
Role = Literal["trainer", "orchestrator"]
# These come once and before the first step: the fault's step does not matter.
START: frozenset[FaultPlace] = frozenset({"join", "load"})


@dataclass(frozen=True)
class InjectedFault:
    """`act` runs on one rank at one step; `what` is for people.

    Attributes:
        everywhere: act runs on all ranks; `Strike.culprit` tells which is the configured one.
        repeated: act runs at every step from the configured one on.
    """

    place: FaultPlace
    what: str
    act: Callable[[Strike], None]
    role: Role = "trainer"
    everywhere: bool = False
    repeated: bool = False


KINDS: dict[str, InjectedFault] = {
    "conditional_collective": InjectedFault(
        "metrics", "an extra all_reduce on one rank", acts.conditional_collective
    ),
    "exception_in_cleanup": InjectedFault(
        "step",
        "an exception swallowed on one rank, which waits in the cleanup's barrier",
        acts.exception_in_cleanup,
    ),
    "busy_rank": InjectedFault("step", "endless Python work on one rank", acts.busy_rank),
    "long_collection": InjectedFault(
        "step", "endless garbage collections on one rank", acts.long_collection
    ),
    "stop_rank": InjectedFault("step", "one rank stopped by SIGSTOP", acts.stop_process),
    "kill_rank": InjectedFault("step", "one rank killed by SIGKILL", acts.kill_process),
    "dataloader": InjectedFault(
        "data", "one rank's data iterator sleeps forever", acts.sleep_for_ever
    ),
    "dataloader_worker": InjectedFault(
        "data", "one rank's loader worker waits for a lock held at its fork", acts.dataloader_worker
    ),
    "out_of_data": InjectedFault(
        "data", "one rank's data ends: it leaves the loop and exports", acts.out_of_data
    ),
    "no_rendezvous": InjectedFault("join", "one rank never joins the others", acts.sleep_for_ever),
    "model_load": InjectedFault(
        "load", "one rank never ends loading its model", acts.sleep_for_ever
    ),
    "op_mismatch": InjectedFault(
        "step", "one rank gathers where the others all_reduce", acts.op_mismatch
    ),
    "size_mismatch": InjectedFault(
        "step", "one rank's all_reduce has more elements", acts.size_mismatch
    ),
    "fewer_micro_batches": InjectedFault(
        "step", "one rank runs one micro batch less", acts.fewer_micro_batches
    ),
    "wrong_shape": InjectedFault(
        "step", "one rank's micro batches are a token narrower", acts.wrong_shape
    ),
    "two_threads": InjectedFault(
        "step", "a second thread of one rank uses the same group", acts.two_threads
    ),
    "cross_group_order": InjectedFault(
        "step",
        "one rank uses two groups in the other order",
        acts.cross_group_order,
        everywhere=True,
    ),
    "storage_stall": InjectedFault("step", "fsync never returns on one rank", acts.storage_stall),
    "slow_steps": InjectedFault(
        "step",
        "every step is seconds longer on all ranks",
        acts.slow_step,
        everywhere=True,
        repeated=True,
    ),
    "kill_orchestrator": InjectedFault(
        "rollout", "the orchestrator killed by SIGKILL", acts.kill_process, role="orchestrator"
    ),
    "stop_orchestrator": InjectedFault(
        "rollout", "the orchestrator stopped by SIGSTOP", acts.stop_process, role="orchestrator"
    ),
    "weights_not_loaded": InjectedFault(
        "weights",
        "the orchestrator never loads new weights",
        acts.sleep_for_ever,
        role="orchestrator",
    ),
    "staleness_zero": InjectedFault(
        "rollout",
        "the orchestrator's staleness leaves no capacity",
        acts.staleness_zero,
        role="orchestrator",
    ),
}


def check_kind(kind: str) -> InjectedFault:
    """Look a fault up.

    Raises:
        ConfigError: no such kind.
    """
    return look_up("fault kind", kind, KINDS, error=ConfigError)


class Injector:
    """Strikes at the configured rank, step and place; does nothing without a config.

    Raises:
        ConfigError: unknown kind.
    """

    def __init__(self, config: FaultConfig | None, rank: int, role: Role = "trainer") -> None:
        self._config = config
        self._rank = rank
        self._fault = check_kind(config.kind) if config else None
        self._role = role

    def at(self, place: FaultPlace, step: int = 0, subject: Any = None) -> None:
        """Strike if this is the rank, the step and the place.

        Args:
            subject: what the fault may change: the trainer's Context at "step", the
                orchestrator's RolloutController at "rollout".
        """
        config, fault = self._config, self._fault
        if config is None or fault is None or (fault.place, fault.role) != (place, self._role):
            return
        # `rank` in the config is a trainer's; there is only one orchestrator.
        culprit = self._role != "trainer" or config.rank == self._rank
        if not (culprit or fault.everywhere) or not _is_due(fault, config.step, step):
            return
        where = f"rank {self._rank}" if self._role == "trainer" else f"the {self._role}"
        when = "at the start" if place in START else f"at step {step}"
        # Before the act, which may never return or end the process.
        print(f"injected fault: {config.kind} on {where} {when}", flush=True)
        fault.act(Strike(culprit, subject))


def _is_due(fault: InjectedFault, wanted: int, step: int) -> bool:
    return fault.place in START or step == wanted or (fault.repeated and step > wanted)
