"""Which samples stay for layers and drawings when there are too many tokens for all."""

import numpy as np
import pytest

from shakedown.consistency.part import Answers, ComparedSample
from shakedown.consistency.samples import ComparedCompletion, EncodedPrompt, Score
from shakedown.consistency.tally import Shown, Tally


def sample(number: int, *, gap: float = 0.0, tokens: int = 10) -> ComparedSample:
    own = np.full(tokens, -1.0)
    completion = ComparedCompletion(
        EncodedPrompt(number, ids=[1]), [2] * tokens, own - gap, prompt_ids=[1]
    )
    return ComparedSample(completion, Score(own, own, np.full(tokens, 2), own))


def numbers(shown: Shown) -> list[int]:
    return [each.completion.prompt.index for each in shown.samples]


def test_all_samples_stay_while_there_is_room() -> None:
    shown = Shown(room=1000)
    for number in range(100):
        shown.add(sample(number), 0.0)

    assert numbers(shown) == list(range(100))


def test_above_the_room_samples_are_thinned_evenly_and_the_worst_stay() -> None:
    shown = Shown(room=1000)
    worst = [3, 77, 501, 999, *range(601, 633, 2)]
    for number in range(1000):
        shown.add(sample(number), 5.0 if number in worst else 0.0)

    kept = numbers(shown)
    assert set(worst) <= set(kept)
    assert len(kept) * 10 <= 1000
    even = [number for number in kept if number not in worst]
    steps = set(np.diff(even).tolist())
    assert steps == {16}


def test_one_sample_longer_than_the_room_is_still_shown() -> None:
    shown = Shown(room=5)
    shown.add(sample(0, tokens=10), 0.0)

    assert numbers(shown) == [0]


def test_what_is_judged_is_of_all_samples_however_few_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shakedown.consistency.tally.Shown", lambda: Shown(room=300))
    tally = Tally()
    samples = [sample(number, gap=0.5 * (number % 2)) for number in range(200)]
    answers = Answers("vllm", [each.completion for each in samples], [], {}, [])

    tally.add(answers, samples, [])

    assert (tally.samples, tally.sums.tokens) == (200, 2000)
    assert len(tally.shown.samples) < 60
    assert tally.sums.measure(resamples=2)["mean_abs_dlogp"].value == pytest.approx(0.25)
