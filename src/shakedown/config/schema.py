"""The typed, strict configuration of a run. Every key is explained in config/config.yaml."""

import re
from pathlib import Path
from typing import Annotated, Literal, TypeGuard

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shakedown.config.policy import GrpoConfig, Limit, OptimizerConfig, TokenLimits
from shakedown.config.values import Name, NonNegative, Place, Positive, Seconds, Section
from shakedown.core.errors import did_you_mean
from shakedown.core.paths import RunPaths

Sink = Literal["tensorboard", "wandb"]


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


class ModelConfig(Section):
    """`source`: `demo` (a tiny Qwen3 written once), a local folder, or a hub name."""

    source: Place
    dtype: Literal["float32", "bfloat16"] = "float32"


class DataConfig(Section):
    """`train` and `heldout`: `demo`, a file, `hub:NAME[:SPLIT]`, or a known data set's name."""

    train: Place
    heldout: Place
    format: str = ""
    reward: Place = "exact_match"
    reward_timeout: Seconds = 10.0
    reward_memory_gb: Annotated[float, Field(gt=0)] = 4.0
    train_size: Positive = 8000
    heldout_size: Positive = 400


class ClusterConfig(Section):
    """What the run expects to find; preflight compares it with what is there."""

    nodes: Positive = 1
    gpus_per_node: NonNegative = 0
    gpu_model: str = ""
    launcher: Literal["local", "slurm"] = "local"
    partition: str = ""
    account: str = ""
    # Long options alone, value and all in one word: a bare word would become srun's program.
    srun_args: list[Annotated[str, Field(pattern=r"^--[a-z][a-z0-9-]*(=[^\n]*)?$")]] = []
    leaves: dict[str, str] = {}


class PreflightConfig(Section):
    """Checks before anything is started."""

    tier: Literal["quick", "standard", "burn"] = "quick"
    min_free_disk_gb: Annotated[float, Field(ge=0)] = 2.0
    min_shm_mb: Annotated[float, Field(ge=0)] = 64.0
    probe_timeout: Seconds = 60.0
    spare_nodes: NonNegative = 0
    pin_nodes: bool = True
    exclude_hours: Annotated[float, Field(ge=0)] = 24.0
    baseline: Place = ""


class ServeConfig(Section):
    """The persistent inference server."""

    engine: Literal["vllm", "sglang", "transformers", "external"] = "vllm"
    # One, or several as a list or with commas between; kept with commas.
    url: Annotated[
        str,
        BeforeValidator(lambda given: ",".join(given) if _is_texts(given) else given),
        Field(pattern=r"^(https?://[^\s@,]+(,https?://[^\s@,]+)*)?$"),
    ] = ""
    key_file: Place = ""
    key_env: Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")] = ""
    allocation: str = "vllm:d1"
    share_gpus: bool = False
    max_model_len: Positive = 256
    kv_cache_gb: Annotated[float, Field(gt=0)] = 1.0
    ready_timeout: Seconds = 300.0
    lease: Seconds = 900.0
    keep: bool = False
    logprobs: Literal["raw", "processed"] = "raw"
    extra_args: list[str] = []

    @property
    def cut(self) -> str:
        """The allocation; empty for what is one process, or somebody else's."""
        return "" if self.engine in ("transformers", "external") else self.allocation

    @model_validator(mode="after")
    def _external_has_a_url(self) -> "ServeConfig":
        if (self.engine == "external") != bool(self.url):
            raise ValueError("`engine: external` and `url` belong together: one of them is missing")
        return self


class AgentsConfig(Section):
    """The agent checks: one episode, then all of a local batch at once, then the controller.

    The local batch, in prompts, is `prompts`, or else one of `rollout_dp` replicas' share of
    `global_batch`. With AReaL's example sizes, the defaults: 64 x 8 = 512 episodes at once.
    """

    target: Place
    kwargs: dict[str, JsonValue] = {}
    global_batch: Positive = 256
    group_size: Positive = 8
    rollout_dp: Positive = 4
    prompts: Positive | None = None
    episode_timeout: Seconds = 120.0
    min_success_rate: Annotated[float, Field(ge=0, le=1)] = 1.0

    @property
    def local_batch(self) -> int:
        """Prompts of one replica's share."""
        return self.prompts or self.global_batch // self.rollout_dp

    @model_validator(mode="after")
    def _batch_is_cut_evenly(self) -> "AgentsConfig":
        if not self.prompts and self.global_batch % self.rollout_dp:
            raise ValueError(
                f"global_batch {self.global_batch} cannot be cut into rollout_dp "
                f"{self.rollout_dp} equal shares: set a multiple of it, or `prompts`, one share"
            )
        return self


class ConsistencyLimits(TokenLimits):
    """Those of `compare`, which also generates greedily."""

    greedy_divergence_rate: Limit = None


class ConsistencyConfig(Section):
    """Rollout consistency: `samples` generated once and scored by each side.

    `limits` are over those of the grade.
    """

    reference: Literal["transformers"] = "transformers"
    samples: Positive = 64
    max_tokens: Positive = 24
    temperature: Annotated[float, Field(ge=0)] = 1.0
    grade: Literal["auto", "dense", "moe", "fp8", "strict"] = "auto"
    limits: ConsistencyLimits = ConsistencyLimits()


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


class StageConfig(Section):
    """One training stage. `batch_size`: sequences (SFT) or prompts (GRPO) a step, all ranks."""

    algorithm: Literal["sft", "grpo"]
    allocation: str
    steps: Positive
    batch_size: Positive
    optimizer: OptimizerConfig
    nodes: Positive = 1
    micro_batch_size: Positive | None = None
    activation_checkpointing: bool = False
    compile: bool = False
    checkpoint_every: Positive = 50
    keep_checkpoints: Positive = 2
    eval_samples: NonNegative = 400
    eval_every: NonNegative = 0
    sinks: list[Sink] = []
    stall_timeout: Seconds = 60.0
    start_timeout: Seconds = 300.0
    debug: Literal["off", "info", "detail", "blocking"] = "off"
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


class Config(Section):
    """A whole run: `results/<run>/` is written from it. `order`: stages that run; empty: all."""

    run: Name
    results: Place = "results"
    group_reads: bool = False
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    model: ModelConfig
    data: DataConfig
    cluster: ClusterConfig = ClusterConfig()
    preflight: PreflightConfig = PreflightConfig()
    serve: ServeConfig = ServeConfig()
    agents: AgentsConfig
    consistency: ConsistencyConfig = ConsistencyConfig()
    stages: dict[Name, StageConfig]
    order: list[Name] = []  # below `stages`, which its validator looks at

    @property
    def paths(self) -> RunPaths:
        """Where the run's results lie."""
        return RunPaths(Path(self.results) / self.run)

    @field_validator("stages")
    @classmethod
    def _has_a_stage(cls, stages: dict[str, StageConfig]) -> dict[str, StageConfig]:
        if not stages:
            raise ValueError("`stages` is empty: list at least one training stage")
        return stages

    @field_validator("order")
    @classmethod
    def _order_names_stages(cls, order: list[str], info: ValidationInfo) -> list[str]:
        stages = info.data.get("stages", {})  # missing where they are at fault themselves
        for name in order if stages else ():
            if name not in stages:
                known = ", ".join(stages)
                guess = did_you_mean(name, stages)
                raise ValueError(f"`order` names no stage by {name!r}{guess}; stages: {known}")
        if len(set(order)) < len(order):
            raise ValueError(f"`order` names a stage twice: {', '.join(order)}")
        return order
