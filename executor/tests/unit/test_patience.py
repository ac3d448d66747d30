"""sbatch's refusals: which pass, how long one waits, and when one gives up."""

from collections.abc import Callable, Iterator

import pytest
from submitit.core.utils import FailedJobError

from snakemake_executor_plugin_submitit.patience import GaveUpError, is_transient, with_patience

BUSY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
WRONG = "sbatch: error: invalid partition specified: moon"


class Clock:
    """Time that passes only by sleeping; `pauses` are the sleeps in seconds."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def now(self) -> float:
        return sum(self.pauses)


def answers(*outcomes: str | list[str]) -> Callable[[], list[str]]:
    """A submission that fails with each text in turn and succeeds with a list."""
    rest: Iterator[str | list[str]] = iter(outcomes)

    def attempt() -> list[str]:
        outcome = next(rest)
        if isinstance(outcome, str):
            raise FailedJobError(outcome)
        return outcome

    return attempt


def patient(attempt: Callable[[], list[str]], clock: Clock, cleaned: list[int]) -> list[str]:
    return with_patience(
        attempt,
        patience=100,
        clean_up=lambda: cleaned.append(1),
        on_retry=lambda _words, _seconds: None,
        sleep=clock.pauses.append,
        clock=clock.now,
    )


def test_a_busy_controller_is_asked_again_with_growing_pauses() -> None:
    clock, cleaned = Clock(), list[int]()

    ids = patient(answers(BUSY, BUSY, BUSY, ["7"]), clock, cleaned)

    assert ids == ["7"]
    assert clock.pauses == [2, 4, 8]
    assert len(cleaned) == 3


def test_a_lasting_refusal_is_not_repeated() -> None:
    clock = Clock()

    with pytest.raises(GaveUpError, match="moon") as caught:
        patient(answers(WRONG, ["7"]), clock, [])

    assert caught.value.lasting
    assert clock.pauses == []


def test_patience_ends() -> None:
    clock = Clock()

    with pytest.raises(GaveUpError, match="Socket timed out") as caught:
        patient(answers(*[BUSY] * 50), clock, [])

    assert not caught.value.lasting
    assert clock.now() == 100  # the last attempt is made when it ends


@pytest.mark.parametrize(
    "words",
    [
        BUSY,
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller "
        "(connect failure)",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\nJob violates accounting/QOS policy",
        "squeue does not answer after 60 s",
    ],
)
def test_what_may_pass_is_transient(words: str) -> None:
    assert is_transient(words)


@pytest.mark.parametrize(
    "words",
    [
        WRONG,
        "Batch job submission failed: Requested node configuration is not available",
        "Batch job submission failed: Invalid account or account/partition combination specified",
    ],
)
def test_what_stays_wrong_is_not(words: str) -> None:
    assert not is_transient(words)
