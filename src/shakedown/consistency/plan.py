"""What a comparison is asked to do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shakedown.consistency.accuracy import RewardOf

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to compare and how.

    Attributes:
        url: the server's, without `/v1`.
        api_key: what it asks for.
        limits: of single metrics, over the grade's.
        reward: judges completions against each row's `answer`; None: accuracies are not measured.
            `reward_name` is what it is called.
        folder: the data file's, where relative paths of images begin.
        again: the command that goes on from what a stopped comparison has on disk.
    """

    url: str
    reference: str
    rows: Sequence[Mapping[str, Any]]
    model: str = ""
    dtype: str = "auto"
    max_tokens: int = 64
    temperature: float = 1.0
    grade: str = "dense"
    limits: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    concurrency: int = 64
    request_timeout: float = 300.0
    api_key: str = field(default="", repr=False)
    reward: RewardOf | None = field(default=None, repr=False)
    reward_name: str = ""
    again: str = "the same command"
    folder: Path | None = None
