"""How many rollouts may be in flight: AReaL's staleness rule, and when it would block for ever.

    capacity = min(max_concurrent - running,
                   (max_head_offpolicyness + version + 1) * batch_size - (accepted + running))

A unit is what the consumer takes: here a group of samples of one prompt. `version` counts the
consumer's updates from the start; `accepted` counts finished units from the start.
"""

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
    """What the rule lets start, and after how many batches nothing more, before it is tried."""
    first = rule.allowed(0)
    return (
        f"capacity {rule.capacity(version=0, running=0, accepted=0)} groups at the start; 0 after "
        f"{first // rule.batch_size} batches of {rule.batch_size} (max_head_offpolicyness "
        f"{rule.max_head_offpolicyness}), until an update raises the version"
    )


def explain(rule: Staleness, *, needed: int) -> str:
    """Say before the start why rollout would block for ever; empty when it would not.

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
    # AReaL's own defaults (off-policyness 0, batch size 1) fall into this: rollout stops after one
    # episode, and nothing says why.
    allowed = rule.allowed(0)
    if allowed < needed:
        return (
            f"rollout blocks for ever after {allowed} accepted: "
            f"(max_head_offpolicyness {rule.max_head_offpolicyness} + version 0 + 1) * batch_size "
            f"{rule.batch_size} = {allowed}, but the consumer takes {needed} before it raises the "
            f"version. Set batch_size to {needed}, what one update consumes."
        )
    return ""
