"""Reports of other people, recorded runs and the foreign cases of the tests, judged together."""

from pathlib import Path

import pytest
from corpus import Score, judged

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def scores() -> list[Score]:
    return judged([DATA / "corpus", DATA / "scoreboard"])


@pytest.mark.slow
def test_nobody_innocent_is_named(scores: list[Score]) -> None:
    assert [(s.case, s.innocents) for s in scores if s.innocents] == []


@pytest.mark.slow
def test_no_answer_gets_worse(scores: list[Score]) -> None:
    """Numbers to be raised with the diagnosis, never lowered, unless new cases show a guess."""
    answers = [score.answer for score in scores]
    assert answers.count("right") >= 1420
    assert answers.count("wrong") <= 58
    assert sum(score.exact for score in scores) >= 1935
    assert sum(bool(score.shown) for score in scores) >= 2355


@pytest.mark.slow
def test_misleading_heaps_do_not_mislead_more() -> None:
    """Cases made to mislead: red herrings near the end, pieces of other jobs and attempts."""
    scores = judged([DATA / "misleading"])
    assert len(scores) == 64
    assert sum(score.answer == "wrong" for score in scores) <= 3
    assert sum(bool(score.innocents) for score in scores) <= 1
