from typing import Any, Literal, TypeAlias

from pydantic import BaseModel
from pydantic_config import BaseConfig

Level: TypeAlias = Literal["info", "debug"]


class LogConfig(BaseConfig):
    level: Level | None = None


class PassedOver(BaseModel):
    known: int = 1


class Open(BaseConfig, extra="allow"):
    known: int = 1


class Moved(BaseConfig):
    interval: int = 5
