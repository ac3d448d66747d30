"""The plan of a comparison."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shakedown.consistency.accuracy import RewardOf
from shakedown.consistency.compare import Array
from shakedown.consistency.samples import Scored
from shakedown.core.errors import UsageError
from shakedown.core.model_folder import check_sizes, check_tokenizer
from shakedown.core.verdict import Finding

SayProgress = Callable[[str], None]
# (sequences, dtype, temperature) -> log-probabilities of the completions by a trainer's forward.
TrainerScores = Callable[[Sequence[Scored], str, float], list[Array]]


@dataclass(frozen=True)
class ComparisonPlan:
    """The sides, data and settings of a comparison.

    Attributes:
        url: the server's, without `/v1`.
        api_key: the key that it requires.
        limits: those of single metrics, overriding the grade's.
        reward: judges completions against each row's `answer`; None: accuracies are not measured.
            `reward_name` is its name.
        folder: the data file's, to which relative image paths refer.
        engine_dtype, engine_weights, engine_log: the server's dtype, model folder and log, if
        known. factors: `auto` measures the deep ones only if the comparison does not pass, `all`
        always. trainer: a trainer's own forward pass; `trainer_name` is its name. servers: findings
        on each, if there are several. again: the command that continues a stopped comparison.
    """

    url: str
    reference: str
    rows: Sequence[Mapping[str, Any]]
    model: str = ""
    dtype: str = "auto"
    max_tokens: int = 64
    temperature: float = 1.0
    grade: str = "auto"
    limits: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    concurrency: int = 128
    request_timeout: float = 300.0
    api_key: str = field(default="", repr=False)
    reward: RewardOf | None = field(default=None, repr=False)
    reward_name: str = ""
    engine_dtype: str = ""
    engine_weights: str = ""
    engine_log: str = ""
    factors: str = "auto"
    trainer: TrainerScores | None = field(default=None, repr=False)
    trainer_name: str = ""
    again: str = "the same command"
    folder: Path | None = None
    servers: Callable[[], Sequence[Finding]] = list


def check_reference(model: str) -> None:
    """Refuse an unusable local folder at once; a hub name is not looked up.

    Raises:
        UsageError: no such folder, no tokenizer in it, or its sizes are not those of its weights.
    """
    folder = Path(model)
    if (folder / "config.json").is_file():
        check_tokenizer(folder)
        check_sizes(folder)
    elif model.startswith((".", "/")) or model.count("/") > 1:
        raise UsageError(
            f"reference model {model}: no such folder, or no config.json in it",
            hint="give a Hugging Face checkpoint folder or a hub name",
        )
