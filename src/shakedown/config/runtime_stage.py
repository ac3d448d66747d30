"""A stage of our own runtime: SFT or GRPO. Every key is explained in config/config.yaml."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from shakedown.config.policy import GrpoConfig, OptimizerConfig
from shakedown.config.values import NonNegative, Positive, Section, SupervisedStage

SinkName = Literal["tensorboard", "wandb"]


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


class SftConfig(Section):
    """`max_length`: of a row, in tokens; None: the model's positions."""

    max_length: Annotated[int, Field(ge=2)] | None = None
    too_long: Literal["leave_out", "truncate"] = "leave_out"


class StageConfig(SupervisedStage):
    """A stage of our own. `batch_size`: sequences (SFT) or prompts (GRPO) per step, all ranks."""

    algorithm: Literal["sft", "grpo"]
    allocation: str
    steps: Positive
    batch_size: Positive
    optimizer: OptimizerConfig
    micro_batch_size: Positive | None = None
    max_tokens_per_micro_batch: Positive | None = None
    activation_checkpointing: bool = False
    compile: bool = False
    checkpoint_every: Positive = 50
    keep_checkpoints: Positive = 2
    eval_samples: NonNegative = 400
    eval_every: NonNegative = 0
    sinks: list[SinkName] = []
    sft: SftConfig | None = None
    grpo: GrpoConfig | None = None
    fault: FaultConfig | None = None
    profile: ProfileConfig | None = None

    @model_validator(mode="after")
    def _each_sink_once(self) -> "StageConfig":
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"`sinks` names one twice: {', '.join(self.sinks)}")
        return self

    @model_validator(mode="after")
    def _micro_batches_are_cut_once(self) -> "StageConfig":
        if self.micro_batch_size and self.max_tokens_per_micro_batch:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} and max_tokens_per_micro_batch "
                f"{self.max_tokens_per_micro_batch} both cut a rank's rows: set one of them to null"
            )
        return self

    @model_validator(mode="after")
    def _grpo_section_matches(self) -> "StageConfig":
        if (self.algorithm == "grpo") != (self.grpo is not None):
            raise ValueError("a stage has a `grpo:` section if and only if its algorithm is grpo")
        if self.algorithm != "sft" and self.sft is not None:
            raise ValueError("a stage has an `sft:` section only if its algorithm is sft")
        return self
