"""Config classes in the form of prime-rl's, written for tests of `shakedown lint`."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import verifiers as vf
from pydantic import AliasChoices, ConfigDict, Field, model_validator

from prime_rl.configs.shared import LogConfig, Open, PassedOver

from .shared import Moved as CheckpointConfig

if TYPE_CHECKING:
    from prime_rl.configs.shared import Level

raise RuntimeError("lint reads this file and must not run it")


class NCCL(LogConfig):
    type: Literal["nccl"] = "nccl"
    port: int = 29501


class Filesystem(LogConfig):
    type: Literal["filesystem"] = "filesystem"


class Orchestrator(LogConfig):
    class Sampling(LogConfig):
        temperature: float = 1.0

    registry: ClassVar[dict] = {}
    batch_size: int = Field(128, ge=1)
    group_size: int = Field(4, validation_alias=AliasChoices("group_size", "group"))
    sampling: "Sampling | None" = None
    env: vf.EnvConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _moved(cls, data):
        data["batch_size"] = data.pop("batches", 128)
        return data


class RLConfig(LogConfig):
    model_config = ConfigDict(extra="forbid")

    orchestrator: Orchestrator = Field(default_factory=Orchestrator)
    weight_broadcast: Annotated[NCCL | Filesystem, Field(discriminator="type")] | None = None
    ckpt: CheckpointConfig | None = None
    lenient: PassedOver | None = None
    free: Open | None = None
    stages: list[LogConfig] = []
    tags: dict[str, str] | None = None
