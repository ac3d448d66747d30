"""Who is connected to and paired with whom."""

import pytest

from shakedown.preflight.rounds import (
    ALL_PAIRS,
    leaf_of,
    pair_rounds,
    reach_targets,
    repair_pairs,
)


@pytest.mark.parametrize("count", [3, 4, 5, 8, 16, 17, 33, 128])
def test_rounds_meet_everybody_and_repeat_no_pair(count: int) -> None:
    rounds = pair_rounds(count)

    for pairs in rounds:
        busy = [member for pair in pairs for member in pair]
        assert len(busy) == len(set(busy)) >= count - 1
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    assert {member for pair in met for member in pair} == set(range(count))
    assert len(met) == count * (count - 1) // 2 if count <= ALL_PAIRS else len(rounds) == 2


def test_two_members_have_one_round_and_fewer_have_none() -> None:
    assert pair_rounds(2) == [[(0, 1)]]
    assert pair_rounds(1) == []
    assert pair_rounds(0) == []


def test_beyond_sixteen_members_a_third_round_crosses_the_leaves() -> None:
    leaves = [f"leaf{number // 8}" for number in range(24)]

    first, second, third = pair_rounds(24, leaves)

    assert len({member for pair in third for member in pair}) >= 20
    assert all(leaves[a] != leaves[b] for a, b in third)
    assert not {*first, *second} & set(third)


def test_one_leaf_has_no_third_round() -> None:
    assert len(pair_rounds(24, ["leaf"] * 24)) == 2


def test_leaves_are_known_only_where_every_node_has_one() -> None:
    switches = {"s1": ["n1", "n2"], "s2": ["n3"]}

    assert leaf_of(switches, ["n3", "n1"]) == ["s2", "s1"]
    assert leaf_of(switches, ["n3", "n9"]) == []


@pytest.mark.parametrize("count", [2, 5, 16, 17, 18, 50, 1000])
def test_every_member_reaches_others_and_is_reached_over_each_link_in_both_directions(
    count: int,
) -> None:
    targets = reach_targets(count)

    directed = {(a, b) for a, row in enumerate(targets) for b in row}
    assert all(a != b for a, b in directed)
    assert directed == {(b, a) for a, b in directed}
    assert min(map(len, targets)) >= min(count - 1, 6)
    assert max(map(len, targets)) <= max(ALL_PAIRS - 1, 8)


def test_each_suspect_gets_a_good_partner_of_its_own() -> None:
    assert repair_pairs([2, 3], [0, 1], tried={(0, 2)}) == [(1, 2), (0, 3)]


def test_pairs_that_were_tried_are_not_repeated() -> None:
    assert repair_pairs([2], [0, 1], tried={(0, 2), (1, 2)}) == []


def test_with_too_few_good_members_the_first_suspects_go_first() -> None:
    assert repair_pairs([4, 5, 6], [1], tried=set()) == [(1, 4)]
    assert repair_pairs([4, 5], [], tried=set()) == []
