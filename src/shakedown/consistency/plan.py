"""What a comparison is asked to do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shakedown.consistency.accuracy import RewardOf
from shakedown.core.verdict import Finding

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
        servers: what became of each, where there are several.
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
    servers: Callable[[], Sequence[Finding]] = list
