"""Config classes in the form of AReaL's, written for tests of `shakedown lint`."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from areal.utils.constants import LOSSES

raise RuntimeError("lint reads this file and must not run it")


class Place(str, Enum):
    alone = "separation"
    shared = "colocation"


@dataclass
class Engine:
    path: str = ""
    dtype: str = "bfloat16"
    place: Place = Place.alone
    extra: dict[str, Any] | None = None


@dataclass
class Actor(Engine):
    loss_type: str = field(default="sigmoid", metadata={"help": "loss", "choices": LOSSES})
    weight_update_mode: str = field(default="xccl", metadata={"choices": ["disk", "xccl"]})
    backend: str = MISSING


@dataclass
class Rollout:
    max_head_offpolicyness: int = 0
    consumer_batch_size: int = 1
    engines: list["Engine"] = field(default_factory=list)


@dataclass
class Rows:
    batch_size: int = 1
    type: str | None = None


@dataclass
class SFTConfig:
    seed: int = 1
    tokenizer_path: str = ""
    actor: Actor = field(default_factory=Actor)
    train_dataset: Rows = field(default_factory=Rows)


@dataclass
class PPOConfig(SFTConfig):
    rollout: Rollout = field(default_factory=Rollout)


def load[T](kind: type[T]) -> T:
    return kind()
