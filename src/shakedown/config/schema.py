"""The typed, strict configuration of a run. Every key is explained in config/config.yaml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shakedown.config.command import CommandStage, placeholders_in
from shakedown.config.runtime_stage import StageConfig
from shakedown.config.values import Name, NonNegative, Place, Positive, Seconds, Section
from shakedown.core.errors import did_you_mean
from shakedown.core.paths import RunPaths


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
    chat_template_kwargs: dict[str, JsonValue] = {}
    reward: Place = "exact_match"
    reward_timeout: Seconds = 10.0
    reward_memory_gb: Annotated[float, Field(gt=0)] = 4.0
    reward_failed_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    train_size: Positive = 8000
    heldout_size: Positive = 400


class ClusterConfig(Section):
    """The cluster that the run expects; preflight compares it with the actual one."""

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
    # Of a GRPO stage: on each of them a server of its own.
    nodes: Positive = 1
    max_model_len: Positive = 256
    kv_cache_gb: Annotated[float, Field(gt=0)] = 1.0
    ready_timeout: Seconds = 300.0
    lease: Seconds = 900.0
    keep: bool = False
    logprobs: Literal["raw", "processed"] = "raw"
    extra_args: list[str] = []

    @property
    def cut(self) -> str:
        """The allocation; empty for a single process, or somebody else's server."""
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


Limit = Annotated[float, Field(ge=0)] | None


class ConsistencyLimits(Section):
    """A metric passes up to its limit and fails above it; None leaves it as the grade has it."""

    k3: Limit = None
    token_mult_prob_error: Limit = None
    mean_abs_dlogp: Limit = None
    max_abs_dlogp: Limit = None
    p99_abs_dlogp: Limit = None
    mean_abs_dprob: Limit = None
    chi2: Limit = None
    extreme_share: Limit = None
    greedy_divergence_rate: Limit = None  # of `compare` alone, which also generates greedily


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


# Parts of a fault's place that stand for no key: see `stage_kind`.
STAGE_KINDS = ("<own>", "<command>")


def stage_kind(stage: object) -> str:
    """The schema that a stage is judged by, even if it is not a valid stage."""
    given = stage.get("algorithm") if isinstance(stage, Mapping) else None
    is_command = given == "command" or isinstance(stage, CommandStage)
    return STAGE_KINDS[is_command]


Stage = Annotated[
    Annotated[StageConfig, Tag(STAGE_KINDS[0])] | Annotated[CommandStage, Tag(STAGE_KINDS[1])],
    Discriminator(stage_kind),
]
# Sections that a run of commands alone may omit, by the placeholders that need them.
_UNUSED: Mapping[str, tuple[set[str], Mapping[str, Any]]] = {
    "model": ({"model", "server_url"}, {"source": "demo"}),
    "data": ({"data", "heldout"}, {"train": "demo", "heldout": "demo"}),
    "agents": (set(), {"target": ""}),
}


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
    stages: dict[Name, Stage]
    order: list[Name] = []  # below `stages`, which its validator looks at

    @property
    def paths(self) -> RunPaths:
        """The paths of the run's results."""
        return RunPaths(Path(self.results) / self.run)

    @property
    def own_stages(self) -> dict[str, StageConfig]:
        """Stages of our own runtime, by name."""
        return {n: stage for n, stage in self.stages.items() if isinstance(stage, StageConfig)}

    @property
    def command_stages(self) -> dict[str, CommandStage]:
        """Stages that are a command, by name."""
        return {n: stage for n, stage in self.stages.items() if isinstance(stage, CommandStage)}

    def asks_for(self, *placeholders: str) -> bool:
        """Whether a command of the run has one of these placeholders."""
        return any(s.placeholders & set(placeholders) for s in self.command_stages.values())

    @model_validator(mode="before")
    @classmethod
    def _commands_need_no_model(cls, body: Any) -> Any:
        stages = body.get("stages") if isinstance(body, Mapping) else None
        if not isinstance(stages, Mapping) or not stages:
            return body
        order = body.get("order")
        names = order if _is_texts(order) and order else stages
        if any(stage_kind(stages.get(name)) != STAGE_KINDS[1] for name in names):
            return body
        asked = set(placeholders_in(str(stages)))
        unused = {key: value for key, (by, value) in _UNUSED.items() if not by & asked}
        return {**unused, **body}

    @field_validator("stages")
    @classmethod
    def _has_a_stage(cls, stages: dict[str, Stage]) -> dict[str, Stage]:
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
