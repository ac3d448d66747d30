"""What gloo's aborts, dumps and roles of our own runtime tell."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from shakedown.diagnosis.analyze.model import Hypothesis
from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.records import LogEvent
from tests.hang_own import (
    EXPORT,
    FORWARD,
    OUTER,
    RESET,
    STEP,
    THREAD,
    TRAINER,
    aborted,
    beat,
    beats,
    call,
    chosen,
    dump,
    log,
    outcome,
    stacks,
    steps,
)

# gloo aborts who receives too much: the dumps tell who called otherwise


def test_abort_of_an_innocent_names_the_rank_whose_size_differs(tmp_path: Path) -> None:
    aborted(tmp_path, 1)
    for rank in range(4):
        size = 1005 if rank == 2 else 5
        wrapper = [("<lambda>", "/srv/wrapper.py", 3)] if rank == 2 else []
        path = (*STEP[:-1], *wrapper, STEP[-1])
        last = [call(7, "all_gather", 64, FORWARD), call(8, size=size, path=path, done=False)]
        dump(tmp_path, rank, *steps(), *last)

    found = chosen(tmp_path)

    assert (found.cause, list(found.ranks), found.state) == ("size_mismatch", [2], "exited")
    assert found.evidence[0].path.endswith("trainer-rank1.log")


def test_abort_without_dumps_names_nobody(tmp_path: Path) -> None:
    aborted(tmp_path, 1)
    for rank in (0, 2, 3):
        log(tmp_path, f"trainer-rank{rank}", RESET)

    found = chosen(tmp_path)

    assert (found.cause, list(found.ranks)) == ("size_mismatch", [])
    assert found.needed


def test_other_operation_at_the_same_place_is_a_mismatch_and_elsewhere_a_branch(
    tmp_path: Path,
) -> None:
    same = (*STEP[:-1], ("gathered", "/srv/patch.py", 5))
    other = (*OUTER, ("_step", TRAINER, 125), ("log_metrics", TRAINER, 131))
    for name, path, cause in (
        ("same", same, "collective_mismatch"),
        ("other", other, "conditional_collective"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for rank in range(4):
            odd = call(8, "all_gather", 7, path, done=False)
            last = odd if rank == 1 else call(8, done=False)
            dump(folder, rank, *steps(), call(7, "all_gather", 64, FORWARD), last)

        found = chosen(folder)

        assert (found.cause, list(found.ranks)) == (cause, [1])


def uneven(folder: Path, *phases: str, step_of_last: int = 4) -> Hypothesis:
    """The last rank exports where the others train."""
    aborted(folder, 3, 203392, 6400)
    rows = [beat(rank, phase) for rank, phase in enumerate(phases)]
    rows[-1]["step"] = step_of_last
    beats(folder, *rows)
    for rank in range(4):
        export = call(7, "all_gather", 25, EXPORT, done=False)
        train = call(7, "all_gather", 64, FORWARD, done=False)
        dump(folder, rank, *steps(), export if rank == 3 else train)
    return chosen(folder)


def test_rank_that_exports_while_the_others_train_ran_out_of_batches(tmp_path: Path) -> None:
    found = uneven(tmp_path, "train", "train", "train", "checkpoint")
    assert (found.cause, list(found.ranks)) == ("uneven_inputs", [3])
    assert "without a batch of step 4" in found.sentence


def test_rank_that_exports_after_a_step_of_its_own_took_a_branch(tmp_path: Path) -> None:
    found = uneven(tmp_path, "train", "train", "train", "checkpoint", step_of_last=3)
    assert (found.cause, list(found.ranks)) == ("conditional_collective", [3])


def threads_case(folder: Path, *, everywhere: bool) -> Hypothesis:
    aborted(folder, 1, 203392, 4)
    for rank in range(4):
        before = steps()
        if everywhere:
            before.append(call(7, "all_reduce", 1, THREAD))
            before.append(call(8, "all_gather", 64, FORWARD))
        seq = len(before) + 1
        own = call(seq, "all_reduce", 1, THREAD, done=False)
        main = call(seq, "all_gather", 64, FORWARD, done=False)
        dump(folder, rank, *before, own if rank == 1 else main)
    return chosen(folder)


def test_second_thread_of_one_rank_on_the_others_group_is_named(tmp_path: Path) -> None:
    found = threads_case(tmp_path, everywhere=False)
    assert (found.cause, list(found.ranks)) == ("two_threads_one_group", [1])
    assert "reduce_in_background" in found.sentence


def test_where_all_ranks_have_a_second_thread_their_order_is_at_fault(tmp_path: Path) -> None:
    found = threads_case(tmp_path, everywhere=True)
    assert (found.cause, list(found.ranks)) == ("two_threads_one_group", [])


# groups whose members gloo does not write down


@pytest.mark.parametrize(
    ("groups", "cause", "ranks"),
    [
        ("5655", "cross_group_cycle", [1]),
        ("56", "cross_group_cycle", []),
        ("5566", "network", []),
        ("5555", "network", []),
    ],
)
def test_lone_rank_in_another_group_than_all_others_crossed_the_order(
    tmp_path: Path, groups: str, cause: str, ranks: list[int]
) -> None:
    for rank, group in enumerate(groups):
        last = call(1, size=1, group=(group, "undefined"), done=False, order=7)
        dump(tmp_path, rank, *steps(), last)

    found = chosen(tmp_path)

    assert (found.cause, list(found.ranks)) == (cause, ranks)


# roles

IDLE_LOOP = ("EpollSelector.select (selectors.py:468)", "run_forever (asyncio/base_events.py:607)")
IN_CODE = ("push (orchestrator.py:286)", "run_forever (asyncio/base_events.py:607)")
ACCEPTS = ("select (selectors.py:415)", "serve_forever (socketserver.py:232)")
UPDATES = ("load (engine.py:37)", "Handler.do_POST (engine.py:82)", "run (threading.py:982)")
READS = ("SocketIO.readinto (socket.py:706)", "Handler.do_POST (engine.py:82)")


@pytest.mark.parametrize(
    ("orchestrator", "server", "roles"),
    [
        (IDLE_LOOP, [UPDATES, UPDATES], ["inference"]),
        (IDLE_LOOP, [READS, READS], []),
        (IDLE_LOOP, [UPDATES, READS], []),
        (IN_CODE, [READS, READS], ["orchestrator"]),
    ],
)
def test_weight_update_that_does_not_end_is_the_side_that_works_on_it(
    tmp_path: Path, orchestrator: Sequence[str], server: list[Sequence[str]], roles: list[str]
) -> None:
    for number in (1, 2):
        rows = [beat(0, "rollout_wait"), beat(1, "rollout_wait")]
        beats(tmp_path, *rows, beat(0, "weight_sync", role="orchestrator"), number=number)
        stacks(tmp_path, "orchestrator-rank0", orchestrator, number=number)
        stacks(tmp_path, "inference", ACCEPTS, server[number - 1], number=number)

    found = chosen(tmp_path)

    assert (found.cause, list(found.roles)) == ("weight_sync_one_sided", roles)
    assert roles or found.needed


@pytest.mark.parametrize(("last", "state"), [("finished", "healthy"), ("train", "hung")])
def test_ranks_that_leave_when_asked_did_not_hang_when_they_were_sampled(
    tmp_path: Path, last: str, state: str
) -> None:
    for number, phases in ((1, ("train", "train")), (2, ("finished", last))):
        rows = [{**beat(r, p), "wall": float(number)} for r, p in enumerate(phases)]
        beats(tmp_path, *rows, number=1 if number == 1 else 0)
    for rank in range(2):
        last_call = [] if rank else [call(7, done=False)]
        dump(tmp_path, rank, *steps(), *last_call)
    outcome(tmp_path, "interrupted", sentence="stopped by SIGTERM, state saved")
    found = chosen(tmp_path)
    assert (found.state == "healthy") == (state == "healthy")
    assert not (found.ranks and state == "healthy")


def test_server_that_died_is_told_though_the_ranks_left_in_order(tmp_path: Path) -> None:
    beats(tmp_path, beat(0, "finished"), beat(1, "finished"))
    codes = {"inference": -9, "trainer-rank0": 75, "trainer-rank1": 75}
    outcome(tmp_path, failed_component="inference", exit_codes=codes)
    found = chosen(tmp_path)
    assert (found.cause, list(found.roles)) == ("server_unhealthy", ["inference"])


@pytest.mark.parametrize(
    ("raised", "cause", "role"),
    [
        ("shakedown.core.errors.ServerError: the inference server at http://n1:1 has not been "
         "healthy for 12 s: ReadTimeout", "server_unhealthy", "inference"),
        ("KeyError: 'rows'", "rollout_starvation", "orchestrator"),
    ],
)  # fmt: skip
def test_orchestrator_that_gives_its_server_up_is_not_the_one_at_fault(
    tmp_path: Path, raised: str, cause: str, role: str
) -> None:
    trace = 'Traceback (most recent call last):\n  File "/srv/o.py", line 3, in run\n    go()\n'
    log(tmp_path, "orchestrator", trace + raised + "\n")
    outcome(tmp_path, failed_component="orchestrator", exit_codes={"orchestrator": 1})
    found = chosen(tmp_path)
    assert (found.cause, list(found.roles)) == (cause, [role])


@pytest.mark.parametrize(
    ("phase", "more", "cause"),
    [
        ("rollout_wait", "", "staleness_capacity"),
        ("data", "batch 7/9: 4 samples\nbatch 8/9: 4 samples\n", "rollout_starvation"),
    ],
)
def test_rollouts_held_back_are_the_cause_while_they_are(
    tmp_path: Path, phase: str, more: str, cause: str
) -> None:
    rows = [beat(0, "rollout_wait"), beat(1, "rollout_wait")]
    beats(tmp_path, *rows, beat(0, phase, role="orchestrator"))
    said = "no rollout capacity: 12 groups are made, and the staleness limit allows no more\n"
    log(tmp_path, "orchestrator", said + more)
    found = chosen(tmp_path)
    assert (found.cause, list(found.roles)) == (cause, ["orchestrator"])


# files


def test_rank_of_the_files_name_holds_for_its_first_process_alone(tmp_path: Path) -> None:
    thread = 'Thread {n} (idle): "MainThread"\n    work (train.py:{n})\n\n'
    text = "".join(thread.format(n=n) for n in (3, 4))
    (tmp_path / "pyspy_rank3.txt").write_text(text)
    (tmp_path / "pyspy_ranks_1_2.txt").write_text(text)

    facts = build_facts(read_paths([tmp_path / "pyspy_rank3.txt"]).records)
    several = build_facts(read_paths([tmp_path / "pyspy_ranks_1_2.txt"]).records)

    assert sorted(facts.ranks) == [3]
    assert [f.line for f in facts.ranks[3].path] == [3]
    assert len(facts.unplaced) == 1
    assert sorted(several.ranks) == [0, 1]


def test_words_of_a_command_line_are_no_messages(tmp_path: Path) -> None:
    head = "Process 41: python -m server --run /runs/staleness-capacity/EngineDeadError\n"
    (tmp_path / "pyspy-orchestrator.txt").write_text(head + "Parent " + head)
    rows = read_paths([tmp_path]).records
    assert not [row for row in rows if isinstance(row, LogEvent)]


def test_component_with_endless_digits_is_no_rank(tmp_path: Path) -> None:
    outcome(tmp_path, exit_codes={f"trainer-rank{'9' * 60}": 1, "trainer-rank1": 1})
    facts = build_facts(read_paths([tmp_path]).records)
    assert sorted(facts.ranks) == [1]


def test_folder_of_a_stage_is_judged_by_its_newest_attempt(tmp_path: Path) -> None:
    for number, state in (("001", "hung"), ("002", "completed")):
        attempt = tmp_path / "sft" / "attempts" / number
        for name in ("heartbeat", "evidence", "logs"):
            (attempt / name).mkdir(parents=True)
        beats(attempt / "evidence", beat(0), beat(1))
        outcome(attempt, state)

    verdict = diagnose_paths([tmp_path / "sft"])

    assert verdict.extra["diagnosis"]["cause"] == "healthy"
    assert verdict.summary.endswith("sft: attempt 002, the newest, is judged")
    assert any("attempt 002" in f.measured for f in verdict.findings if f.check == "note")
