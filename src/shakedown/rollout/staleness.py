"""How many rollouts may be in flight, and when each is due: AReaL's staleness rule made a bound.

    capacity = min(max_concurrent - running,
                   (max_head_offpolicyness + version + 1) * batch_size - (accepted + running))

A unit is what the consumer takes: here a group of samples of one prompt. `version` counts the
consumer's updates from the start; `accepted` counts finished units from the start.

The capacity alone bounds how many units are ahead of the consumer, not how old one of them gets: a
slow one could be overtaken for ever. So each has a last batch, `due`, and a batch goes out only
when those behind it can all be in time (`in_time`). That always comes to be: at most
`due * batch_size` units are ever started that are due in batch `due` or before.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shakedown.config import GrpoConfig
from shakedown.core.errors import ConfigError


@dataclass(frozen=True)
class Staleness:
    """`max_head_offpolicyness`: updates that a unit may be behind when it is consumed (0: none).

    `batch_size`: units that one update consumes.
    """

    max_concurrent: int
    max_head_offpolicyness: int
    batch_size: int

    def capacity(self, *, version: int, running: int, accepted: int) -> int:
        """Units that may be started now; negative when a limit was lowered meanwhile."""
        by_slots = self.max_concurrent - running
        by_age = self.allowed(version) - (accepted + running)
        return min(by_slots, by_age)

    def due(self, version: int) -> int:
        """The last batch, counted from 1, for a unit that was started with `version` current.

        Batch s is consumed by the weights of version s - 1, which are then at most
        `max_head_offpolicyness` versions ahead of the unit's: prime-rl's `max_off_policy_steps`.
        """
        return version + self.max_head_offpolicyness + 1

    def in_time(self, versions: Iterable[int], *, batches: int) -> bool:
        """Whether units started at `versions` can all be in their last batch or an earlier one.

        Args:
            batches: that went out before any of them.
        """
        # The earliest due first, a batch's worth at a time: no other order is better.
        due = sorted(map(self.due, versions))
        return all(batches + place // self.batch_size + 1 <= last for place, last in enumerate(due))

    def allowed(self, version: int) -> int:
        """Units that may have been started, from the beginning, while `version` is current."""
        return (self.max_head_offpolicyness + version + 1) * self.batch_size


def stage_rule(stage: str, settings: GrpoConfig, batch_size: int) -> Staleness:
    """The rule of a stage, in groups: its `max_concurrent` counts samples.

    Raises:
        ConfigError: nothing could ever start.
    """
    slots = settings.max_concurrent // settings.group_size
    rule = Staleness(slots, settings.async_level, batch_size)
    if trap := explain(rule, needed=batch_size):
        raise ConfigError(
            f"stages.{stage}.grpo: {trap}",
            hint=f"set max_concurrent to at least group_size, {settings.group_size}",
        )
    return rule


def foretell(rule: Staleness) -> str:
    """The capacity at the start, and the batches after which it is 0, before it is tried."""
    first = rule.allowed(0)
    return (
        f"capacity {rule.capacity(version=0, running=0, accepted=0)} groups at the start; 0 after "
        f"{first // rule.batch_size} batches of {rule.batch_size} (max_head_offpolicyness "
        f"{rule.max_head_offpolicyness}), until an update raises the version"
    )


def explain(rule: Staleness, *, needed: int) -> str:
    """Say before the start why rollout would block forever; empty when it would not.

    Args:
        rule: the settings.
        needed: units that the consumer takes before it raises the version for the first time.
    """
    if rule.max_concurrent < 1:
        return (
            f"max_concurrent is {rule.max_concurrent}: nothing can ever start. "
            "Set it to at least one group of samples."
        )
    if rule.batch_size < 1:
        return f"batch_size is {rule.batch_size}: nothing is ever allowed. Set it to at least 1."
    if rule.max_head_offpolicyness < 0:
        return (
            f"max_head_offpolicyness is {rule.max_head_offpolicyness}: "
            "a rollout cannot be newer than the weights it is for. Set it to 0 or more."
        )
    # AReaL's own defaults (off-policyness 0, batch size 1) hit this: rollout stops after one
    # episode without a message.
    allowed = rule.allowed(0)
    if allowed < needed:
        return (
            f"rollout blocks forever after {allowed} accepted: "
            f"(max_head_offpolicyness {rule.max_head_offpolicyness} + version 0 + 1) * batch_size "
            f"{rule.batch_size} = {allowed}, but the consumer takes {needed} before it raises the "
            f"version. Set batch_size to {needed}, what one update consumes."
        )
    return ""
