"""How a stage updates its model: the optimizer, GRPO, and the watch over its drift."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from shakedown.config.values import (
    Beta,
    Coefficient,
    NonNegative,
    Place,
    Positive,
    Seconds,
    Section,
)


class OptimizerConfig(Section):
    """AdamW. The schedules' formulas: training/engines/base.py; all count updates."""

    lr: Annotated[float, Field(gt=0)]
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: NonNegative = 0
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    decay_steps: NonNegative = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _decay_steps_are_wsds(self) -> "OptimizerConfig":
        if (self.schedule == "wsd") != (self.decay_steps > 0):
            raise ValueError(
                f"decay_steps, the last updates in which the rate falls, belongs to schedule wsd: "
                f"got {self.decay_steps} with {self.schedule}"
            )
        return self


class DriftConfig(Section):
    """The reaction to a trainer and an engine that disagree on tokens of the same weights.

    The limits are those of the run's `consistency`; `patience`: steps in a row.
    """

    action: Literal["flag", "stop", "off"] = "flag"
    patience: Positive = 1


class GrpoConfig(Section):
    """GRPO's own settings. `async_level`: steps the trainer may run ahead (0 = synchronous)."""

    # A group of one has no advantage: its only reward is its mean.
    group_size: Annotated[int, Field(ge=2)] = 16
    max_tokens: Positive = 8
    temperature: Annotated[float, Field(gt=0)] = 1.0
    # DAPO's two limits ("clip-higher", arXiv 2503.14476).
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    epochs: Positive = 1
    advantage: Literal["group_std", "group_mean"] = "group_std"
    loss_level: Literal["token", "sequence", "constant"] = "token"
    ratio: Literal["token", "sequence"] = "token"
    mask_truncated: bool = False
    overlong_tokens: NonNegative = 0
    drop_flat_groups: bool = False
    # DAPO's dynamic sampling (arXiv 2503.14476, section 3.2), bounded.
    refill_flat_groups: NonNegative = 0
    # Formulas and papers of these: training/algorithms/policy_loss.py and policy_update.py.
    decoupled: bool = True
    tis_cap: Coefficient = 2.0
    kl_coef: Coefficient = 0.0
    entropy_coef: Coefficient = 0.0
    async_level: NonNegative = 1
    max_concurrent: Positive = 512
    agent: Place = ""
    agent_kwargs: dict[str, JsonValue] = {}
    agent_timeout: Seconds = 120.0
    batch_timeout: Seconds = 600.0
    weight_update_timeout: Seconds = 120.0
    record: bool = False
    partial_rollouts: bool = False
    drift: DriftConfig = DriftConfig()

    @model_validator(mode="after")
    def _cap_leaves_equal_tokens_alone(self) -> "GrpoConfig":
        # A cap below 1 would also weigh down tokens on which trainer and engine agree.
        if 0 < self.tis_cap < 1:
            raise ValueError(f"tis_cap is 0 (no weights) or at least 1, got {self.tis_cap}")
        return self

    @model_validator(mode="after")
    def _lengths_are_of_single_answers(self) -> "GrpoConfig":
        if self.agent and (self.mask_truncated or self.overlong_tokens):
            raise ValueError("mask_truncated and overlong_tokens do not apply to an agent's calls")
        if self.overlong_tokens >= self.max_tokens:
            raise ValueError(
                f"overlong_tokens {self.overlong_tokens} is not below max_tokens {self.max_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _agent_goes_with_its_settings(self) -> "GrpoConfig":
        if self.agent and self.partial_rollouts:
            raise ValueError("partial_rollouts would interrupt an agent's requests: set only one")
        if self.agent_kwargs and not self.agent:
            raise ValueError("agent_kwargs are for the class that `agent` names: set that too")
        return self
