"""The judge over sequences of looks: what moves, what is suspect and why, and what ends it."""

from collections.abc import Callable, Iterator

import pytest

from shakedown.monitor.attach.judge import Judge, Judgement
from shakedown.progress.patience import Patience
from tests.unit.monitor.attach.looks import Rank, looks_at

PATIENCE = Patience(life=60, work=300)
Act = Callable[[list[Rank], float], None]


def two() -> list[Rank]:
    return [Rank(0), Rank(1, host="n2")]


def follow(act: Act, *, until: float, interval: float = 30.0) -> list[Judgement]:
    """Judgements of looks at two ranks, one every `interval` seconds."""
    judge, ranks = Judge(PATIENCE), two()
    return [step(judge, ranks, act, now) for now in _times(until, interval)]


def _times(until: float, interval: float) -> Iterator[float]:
    yield from (interval * number for number in range(int(until / interval) + 1))


def step(judge: Judge, ranks: list[Rank], act: Act, now: float) -> Judgement:
    act(ranks, now)
    return judge.observe(looks_at(ranks, now), now)


def does_nothing(_ranks: list[Rank], _now: float) -> None:
    """As ranks that wait for each other."""


def prints(ranks: list[Rank], now: float) -> None:
    ranks[0].output += 10


def prints_every_40_s(ranks: list[Rank], now: float) -> None:
    ranks[0].output, ranks[1].cpu = 10 * int(now // 40), now


def sleeps_90_s_a_step(ranks: list[Rank], now: float) -> None:
    ranks[0].output = 10 * int(now // 90)


def reads_alone(ranks: list[Rank], now: float) -> None:
    ranks[1].io += 4096


def computes_alone(ranks: list[Rank], now: float) -> None:
    ranks[0].cpu = ranks[1].cpu = now


def wakes_up_now_and_then(ranks: list[Rank], now: float) -> None:
    ranks[0].cpu = ranks[1].cpu = now / 100


@pytest.mark.parametrize("act", [prints, prints_every_40_s, reads_alone])
def test_a_job_that_prints_or_reads_moves(act: Act) -> None:
    assert {j.state for j in follow(act, until=3000)} == {"moving"}


@pytest.mark.parametrize(
    ("act", "kind", "first"),
    [
        (does_nothing, "still", 60.0),
        (wakes_up_now_and_then, "still", 60.0),
        (computes_alone, "busy", 300.0),
    ],
)
def test_who_shows_no_sign_of_life_is_suspect_once_patience_is_over(
    act: Act, kind: str, first: float
) -> None:
    found = follow(act, until=600)
    suspect = [30.0 * number for number, j in enumerate(found) if j.state == "suspect"]
    assert suspect[0] == first
    assert found[-1].kind == kind


def test_waiting_without_cpu_is_certain_only_after_the_time_of_a_stall() -> None:
    found = follow(does_nothing, until=300)
    assert [j.waited for j in found if j.state == "suspect"] == [False] * 8 + [True]


def test_pauses_that_ended_teach_patience() -> None:
    judge, ranks = Judge(PATIENCE), two()
    for now in _times(360, 30):
        learned = step(judge, ranks, sleeps_90_s_a_step, now)
    assert learned.state == "moving"
    found = {
        now: judge.observe(looks_at(ranks, now), now).state for now in (390.0, 600.0, 630.0, 660.0)
    }
    assert found == {390.0: "moving", 600.0: "moving", 630.0: "suspect", 660.0: "suspect"}


def test_a_job_that_prints_no_more_but_reads_is_told_apart() -> None:
    def act(ranks: list[Rank], now: float) -> None:
        ranks[0].output += 10 if now <= 120 else 0
        ranks[0].io += 500

    found = follow(act, until=420)
    assert [j.state for j in found[:-1]] == ["moving"] * 14
    assert (found[-1].kind, found[-1].waited) == ("unprinted", False)


def test_one_look_at_a_stopped_rank_is_a_doubt_and_two_are_a_suspicion() -> None:
    judge, ranks = Judge(PATIENCE), two()
    step(judge, ranks, prints, 0.0)
    ranks[1].state = "T"
    assert step(judge, ranks, prints, 30.0).state == "moving"
    assert judge.doubts
    found = step(judge, ranks, prints, 35.0)
    assert (found.state, found.kind, found.names) == (
        "suspect",
        "stopped",
        (("n2", "trainer-rank1"),),
    )
    assert "trainer-rank1 on n2 is stopped" in found.sentence


def test_a_debuggers_short_stop_is_no_suspicion() -> None:
    judge, ranks = Judge(PATIENCE), two()
    states = ["S", "t", "S", "t", "S"]
    found = []
    for number, state in enumerate(states):
        ranks[1].state = state
        found.append(step(judge, ranks, prints, 30.0 * number).state)
    assert found == ["moving"] * 5


def test_what_was_looked_into_is_not_raised_again_until_it_happens_again() -> None:
    judge, ranks = Judge(PATIENCE), two()
    ranks[1].state = "T"
    step(judge, ranks, prints, 0.0)
    judge.accept(step(judge, ranks, prints, 5.0), 10.0)
    assert step(judge, ranks, prints, 30.0).state == "moving"
    assert not judge.doubts
    assert judge.impaired
    ranks[1].state = "S"
    step(judge, ranks, prints, 60.0)
    assert not judge.impaired
    ranks[1].state = "T"
    step(judge, ranks, prints, 90.0)
    assert step(judge, ranks, prints, 95.0).kind == "stopped"


def test_what_reading_stacks_made_a_rank_write_is_no_movement() -> None:
    judge, ranks = Judge(PATIENCE), two()
    for now in _times(60, 30):
        found = judge.observe(looks_at(ranks, now), now)
    judge.accept(found, 65.0)
    ranks[0].io += 9000  # faulthandler's own stacks
    found = judge.observe(looks_at(ranks, 90.0), 90.0)
    assert (found.kind, judge.moves) == ("still", 0)


def test_a_rank_that_is_gone_while_others_are_there_is_suspect() -> None:
    judge, ranks = Judge(PATIENCE), two()
    step(judge, ranks, prints, 0.0)
    ranks[1].here = False
    assert step(judge, ranks, prints, 30.0).state == "moving"
    found = step(judge, ranks, prints, 35.0)
    assert (found.kind, found.names) == ("gone", (("n2", "trainer-rank1"),))


def test_a_rank_that_was_never_there_is_suspect() -> None:
    judge, ranks = Judge(PATIENCE), [Rank(0)]
    for now in (0.0, 5.0):
        found = judge.observe(looks_at(ranks, now, absent=[1]), now)
    assert (found.kind, found.names) == ("gone", (("n1", "trainer-rank1"),))


def test_a_rank_that_came_back_on_another_node_is_not_gone() -> None:
    judge, ranks = Judge(PATIENCE), [*two(), Rank(1, host="n3", pid=9, here=False)]
    step(judge, ranks, prints, 0.0)
    ranks[1].here, ranks[2].here = False, True
    assert [step(judge, ranks, prints, now).state for now in (30.0, 35.0)] == ["moving"] * 2


def test_all_gone_is_an_end_that_names_who_went_first() -> None:
    judge, ranks = Judge(PATIENCE), two()
    step(judge, ranks, prints, 0.0)
    ranks[1].here = False
    step(judge, ranks, prints, 30.0)
    ranks[0].here = False
    found = step(judge, ranks, prints, 35.0)
    assert found.state == "ended"
    assert "trainer-rank1 on n2 went first" in found.sentence


def test_nothing_there_yet_is_no_end() -> None:
    judge, ranks = Judge(PATIENCE), two()
    ranks[0].here = ranks[1].here = False
    assert [step(judge, ranks, prints, now).state for now in (0.0, 600.0)] == ["waiting"] * 2
    ranks[0].here = ranks[1].here = True
    assert step(judge, ranks, prints, 630.0).state == "moving"


def test_a_rank_in_the_kernels_hands_for_a_whole_interval_is_suspect() -> None:
    judge, ranks = Judge(PATIENCE), two()
    found = []
    for now in (0.0, 30.0, 35.0):
        ranks[1].state = "D"
        found.append(step(judge, ranks, prints, now))
    assert [j.state for j in found] == ["moving", "moving", "suspect"]
    assert found[-1].kind == "held"


def test_a_rank_that_reads_a_disk_at_each_look_is_not_held() -> None:
    def act(ranks: list[Rank], now: float) -> None:
        ranks[1].state, ranks[1].io = "D", int(now) * 1000

    assert {j.state for j in follow(act, until=300)} == {"moving"}


def test_a_node_without_an_answer_is_suspect_and_its_ranks_are_not_gone() -> None:
    judge, ranks = Judge(PATIENCE), two()
    step(judge, ranks, prints, 0.0)
    found = []
    for now in (30.0, 60.0, 90.0):
        prints(ranks, now)
        found.append(judge.observe(looks_at(ranks, now, silent=["n2"]), now))
    assert [j.kind for j in found] == ["", "", "silent"]
    assert found[-1].sentence == "no look at n2 for 90 s"


def test_an_engine_that_works_is_a_sign_of_life_while_all_ranks_wait() -> None:
    judge, engine = Judge(PATIENCE), Rank(None)
    ranks = [*two(), engine]
    found = []
    for now in _times(600, 30):
        engine.cpu, engine.output = now, engine.output + 10 * (now < 300)
        found.append(judge.observe(looks_at(ranks, now), now).state)
    assert found == ["moving"] * 19 + ["suspect"] * 2


def test_a_launcher_that_stops_or_goes_is_nobodys_loss() -> None:
    judge, launcher = Judge(PATIENCE), Rank(None)
    ranks = [*two(), launcher]
    step(judge, ranks, prints, 0.0)
    launcher.state = "T"
    found = [step(judge, ranks, prints, now).state for now in (30.0, 35.0)]
    launcher.here = False
    found += [step(judge, ranks, prints, now).state for now in (60.0, 65.0)]
    assert found == ["moving"] * 4


def test_ranks_that_their_launcher_starts_again_have_not_ended() -> None:
    judge, launcher = Judge(PATIENCE), Rank(None)
    ranks = [*two(), launcher]
    step(judge, ranks, prints, 0.0)
    ranks[0].here = ranks[1].here = False
    found = step(judge, ranks, prints, 30.0)
    assert (found.state, found.sentence) == ("waiting", "none of its 2 ranks is there any more")
    ranks[0].here = ranks[1].here = True
    ranks[0].pid, ranks[1].pid = 300, 301
    assert step(judge, ranks, prints, 60.0).state == "moving"


def test_a_restarted_rank_has_moved() -> None:
    judge, ranks = Judge(PATIENCE), two()
    for now in _times(90, 30):
        ranks[1].pid = 200 if now >= 30 else 0
        found = judge.observe(looks_at(ranks, now), now)
    assert (found.kind, judge.moves) == ("still", 1)
    assert found.quiet == 60.0
