"""What explains the exchanges that failed: an end, a link, or nothing sure."""

import random
from collections.abc import Collection
from itertools import combinations, permutations

import pytest

from shakedown.preflight.network_run import next_wave
from shakedown.preflight.observed import (
    Member,
    PairResult,
    Reach,
    bad_members,
    clocks,
    failing_pairs,
    pairs_explained,
    reach_explained,
    without_failures,
)
from shakedown.preflight.rounds import pair_rounds, reach_targets


def name(number: int) -> str:
    return f"n{number}"


def connections(
    count: int,
    ways_in: Collection[int] = (),
    ways_out: Collection[int] = (),
    links: Collection[tuple[int, int]] = (),
) -> list[Reach]:
    """Who reaches whom where these members' ways and these directions are cut."""
    return [
        Reach(name(a), name(b), ok=not (b in ways_in or a in ways_out or (a, b) in links))
        for a, targets in enumerate(reach_targets(count))
        for b in targets
    ]


def meetings(
    count: int, bad: Collection[int] = (), links: Collection[tuple[int, int]] = ()
) -> list[PairResult]:
    """All rounds and waves of re-pairing over members and links that are really bad."""
    pairs: list[PairResult] = []

    def meet(a: int, b: int) -> None:
        works = not {a, b} & set(bad) and (a, b) not in links
        pairs.append(PairResult(1, name(a), name(b), works))

    for row in pair_rounds(count):
        for a, b in row:
            meet(a, b)
    for _ in range(3):
        for first, second in next_wave([name(n) for n in range(count)], pairs):
            meet(int(first[1:]), int(second[1:]))
    return pairs


SIZES = [3, 4, 5, 8, 16, 17, 33, 128]


@pytest.mark.parametrize("count", SIZES)
def test_whoever_takes_no_connection_is_bad_and_nobody_else(count: int) -> None:
    found = reach_explained(connections(count, ways_in=[1]))

    assert set(found.bad) == {">n1"}
    assert (found.links, found.unsure) == ([], [])


@pytest.mark.parametrize("count", SIZES)
def test_whoever_gets_no_connection_out_is_bad_and_nobody_else(count: int) -> None:
    found = reach_explained(connections(count, ways_out=[2]))

    assert set(found.bad) == {"n2>"}


@pytest.mark.parametrize("count", SIZES)
def test_a_direction_that_is_cut_accuses_neither_end(count: int) -> None:
    found = reach_explained(connections(count, links=[(0, 1)]))

    assert found.bad == {}
    assert [row.ends for row in found.links] == [("n0>", ">n1")]
    assert found.unsure == []


def test_many_links_of_one_member_fail_by_that_member() -> None:
    some = [(3, 1), (3, 2), (3, 4)]

    assert set(reach_explained(connections(5, links=some)).bad) == {"n3>"}
    assert reach_explained(connections(5, links=some[:2])).bad == {}
    assert reach_explained(connections(9, links=some)).bad == {}
    assert reach_explained(connections(5, links=[*some, (0, 1)])).bad == {}


@pytest.mark.parametrize("both", [True, False])
def test_two_members_alone_stay_undecided(both: bool) -> None:
    found = reach_explained(connections(2, ways_in=[1], ways_out=[1] if both else []))

    assert (found.bad, found.links) == ({}, [])
    assert len(found.unsure) == (2 if both else 1)


@pytest.mark.parametrize("count", SIZES)
def test_bad_members_are_found_by_their_pairs_and_no_others(count: int) -> None:
    assert set(pairs_explained(meetings(count, bad=[count - 1])).bad) == {name(count - 1)}


@pytest.mark.parametrize("count", [4, 5, 8, 16, 17, 64])
def test_a_bad_link_blames_neither_member(count: int) -> None:
    found = pairs_explained(meetings(count, links=pair_rounds(count)[0][:1]))

    assert (found.bad, found.unsure) == ({}, [])
    assert len(found.links) == 1


def test_when_every_pair_fails_nobody_is_bad() -> None:
    pairs = meetings(6, bad=range(6))

    assert pairs_explained(pairs).bad == {}
    assert next_wave([name(n) for n in range(6)], pairs) == []


@pytest.mark.parametrize("count", [6, 16, 40, 200])
def test_whatever_is_cut_nobody_innocent_is_named(count: int) -> None:
    draw = random.Random(count)
    everyone = list(range(count))
    for _ in range(50):
        bad = draw.sample(everyone, draw.randint(0, count // 2))
        links = [tuple(draw.sample(everyone, 2)) for _ in range(draw.randint(0, 3))]
        reach = connections(count, ways_in=bad, links=links)  # type: ignore[arg-type]
        sorted_links = [(min(link), max(link)) for link in links]

        assert bad_members(reach, []) <= {name(n) for n in bad}
        found = pairs_explained(meetings(count, bad=bad, links=sorted_links))
        # A member of which several links happen to be cut is as good as bad.
        cut = {n for n in everyone if sum(n in link for link in links) >= 2}
        assert set(found.bad) <= {name(n) for n in {*bad, *cut}}


def test_what_worked_at_the_second_try_is_no_failing_pair_but_a_link_that_failed_once() -> None:
    reach = [Reach(a, b, ok=True) for a, b in permutations(["n0", "n1", "n2"], 2)]
    once = [Reach("n0", "n1", ok=False, error="timed out"), *reach]

    assert failing_pairs(once, []) == set()
    assert [row.ends for row in reach_explained(once).links] == [("n0>", ">n1")]


def test_a_run_can_do_without_the_members_that_fail_most_often() -> None:
    everyone = [name(n) for n in range(5)]
    failing = {frozenset((name(3), name(n))) for n in (0, 1)} | {frozenset((name(2), name(4)))}

    left = without_failures(everyone, failing)

    assert "n3" not in left
    assert len(left) == 3
    assert not any(frozenset(pair) in failing for pair in combinations(left, 2))


def test_a_wrong_clock_is_told_by_most_of_the_others() -> None:
    skew = {"n0": 0.0, "n1": 5.0, "n2": 0.0}
    reach = [Reach(a, b, ok=True, ahead=skew[b] - skew[a]) for a, b in permutations(skew, 2)]

    ahead = clocks(reach)

    assert ahead["n1"] == 5.0
    assert abs(ahead["n0"]) < 5.0
    assert clocks([row for row in reach if "n2" not in (row.a, row.b)]) == {}


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [("n1", 0, False), ("n1", 1, True), ("n1#0", 1, True), ("n1#1", 1, False), ("n1#1", 2, True)],
)
def test_members_of_one_node_have_a_gpu_each_or_none(name: str, gpus: int, expected: bool) -> None:
    assert Member(name, "127.0.0.1", 1, 2, gpus=gpus).has_gpu is expected
