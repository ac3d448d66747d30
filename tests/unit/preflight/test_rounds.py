"""Who is paired with whom."""

import pytest

from shakedown.preflight.rounds import repair_pairs, two_rounds


@pytest.mark.parametrize("count", [3, 4, 5, 8, 33, 128])
def test_two_rounds_meet_everybody_and_repeat_no_pair(count: int) -> None:
    rounds = two_rounds(count)

    assert len(rounds) == 2
    for pairs in rounds:
        busy = [member for pair in pairs for member in pair]
        assert len(busy) == len(set(busy)) >= count - 1
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    assert {member for pair in met for member in pair} == set(range(count))


def test_two_members_have_one_round_and_fewer_have_none() -> None:
    assert two_rounds(2) == [[(0, 1)]]
    assert two_rounds(1) == []
    assert two_rounds(0) == []


def test_each_suspect_gets_a_good_partner_of_its_own() -> None:
    assert repair_pairs([2, 3], [0, 1], tried={(0, 2)}) == [(1, 2), (0, 3)]


def test_pairs_that_were_tried_are_not_repeated() -> None:
    assert repair_pairs([2], [0, 1], tried={(0, 2), (1, 2)}) == []


def test_with_too_few_good_members_the_first_suspects_go_first() -> None:
    assert repair_pairs([4, 5, 6], [1], tried=set()) == [(1, 4)]
    assert repair_pairs([4, 5], [], tried=set()) == []
