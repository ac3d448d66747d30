"""A stage of our own runtime: SFT or GRPO. Every key is explained in config/config.yaml."""

import re
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from shakedown.config.base import (
    Coefficient,
    NonNegative,
    Place,
    Positive,
    Seconds,
    Section,
    SupervisedStage,
)

Beta = Annotated[float, Field(ge=0, lt=1)]
Sink = Literal["tensorboard", "wandb"]
Limit = Annotated[float, Field(ge=0)] | None


class TokenLimits(Section):
    """A metric passes up to its limit and fails above it; None leaves it as the grade has it."""

    k3: Limit = None
    token_mult_prob_error: Limit = None
    mean_abs_dlogp: Limit = None
    max_abs_dlogp: Limit = None
    p99_abs_dlogp: Limit = None
    mean_abs_dprob: Limit = None
    chi2: Limit = None
    extreme_share: Limit = None


class FaultConfig(Section):
    """A fault to inject. `step` counts optimizer steps from 1."""

    kind: str
    rank: NonNegative = 1
    step: Positive = 3


class ProfileConfig(Section):
    """Profile the workers that `workers` names over the steps of `steps`.

    As NeMo RL's NRL_NSYS_WORKER_PATTERNS and NRL_NSYS_PROFILE_STEP_RANGE: shell wildcards with
    commas between, and `start:stop`, where steps count from 1 and `stop` is not profiled. `all`
    is the whole run.
    """

    workers: str
    steps: str

    @property
    def patterns(self) -> tuple[str, ...]:
        """The wildcards, without blanks around them and without empty ones."""
        return tuple(part.strip() for part in self.workers.split(",") if part.strip())

    @property
    def bounds(self) -> tuple[int, int | None]:
        """First step, and the first that is not profiled any more; None: there is none."""
        if self.steps == "all":
            return 1, None
        start, _, stop = self.steps.partition(":")
        return int(start), int(stop)

    @field_validator("steps")
    @classmethod
    def _steps_are_a_range(cls, steps: str) -> str:
        plain = re.sub(r"\s", "", steps)  # it becomes a part of file names
        if plain == "all":
            return plain
        match = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", plain)
        if match is None or not 1 <= int(match[1]) < int(match[2]):
            raise ValueError(
                f"expected start:stop with 1 <= start < stop (such as 3:5 for steps 3 and 4), "
                f"or all, got {steps!r:.60}"
            )
        return plain

    @model_validator(mode="after")
    def _names_a_worker(self) -> "ProfileConfig":
        if not self.patterns:
            raise ValueError("`workers` names none: expected patterns such as *policy*,*vllm*")
        return self


class OptimizerConfig(Section):
    """AdamW with linear warm-up."""

    lr: Annotated[float, Field(gt=0)]
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: NonNegative = 0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class DriftConfig(Section):
    """What becomes of a stage whose trainer and engine disagree on the tokens of its own weights.

    `limits` are over those of the run's `consistency`; `patience`: steps in a row.
    """

    action: Literal["flag", "stop", "off"] = "flag"
    limits: TokenLimits = TokenLimits()
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
    loss_level: Literal["token", "sequence"] = "token"
    drop_flat_groups: bool = False
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
    def _agent_goes_with_its_settings(self) -> "GrpoConfig":
        if self.agent and self.partial_rollouts:
            raise ValueError("partial_rollouts would cut the requests of an own agent: set one")
        if self.agent_kwargs and not self.agent:
            raise ValueError("agent_kwargs are for the class that `agent` names: set that too")
        return self


class StageConfig(SupervisedStage):
    """A stage of our own. `batch_size`: sequences (SFT) or prompts (GRPO) a step, all ranks."""

    algorithm: Literal["sft", "grpo"]
    allocation: str
    steps: Positive
    batch_size: Positive
    optimizer: OptimizerConfig
    micro_batch_size: Positive | None = None
    activation_checkpointing: bool = False
    compile: bool = False
    checkpoint_every: Positive = 50
    keep_checkpoints: Positive = 2
    eval_samples: NonNegative = 400
    sinks: list[Sink] = []
    grpo: GrpoConfig | None = None
    fault: FaultConfig | None = None
    profile: ProfileConfig | None = None

    @model_validator(mode="after")
    def _each_sink_once(self) -> "StageConfig":
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"`sinks` names one twice: {', '.join(self.sinks)}")
        return self

    @model_validator(mode="after")
    def _grpo_section_matches(self) -> "StageConfig":
        if (self.algorithm == "grpo") != (self.grpo is not None):
            raise ValueError("a stage has a `grpo:` section if and only if its algorithm is grpo")
        return self
