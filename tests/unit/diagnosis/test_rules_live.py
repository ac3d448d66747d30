"""Samples of a job that may still move: a long step is told from a hang by time alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.outcome import Outcome, OutcomeState
from shakedown.diagnosis.analyze.model import Diagnosis
from shakedown.diagnosis.analyze.rules import analyze
from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.read.step_times import step_lengths
from shakedown.diagnosis.records import BeatRecord
from shakedown.monitor.collect import collect_local
from shakedown.monitor.heartbeat import Heartbeat

NOW = 1.8e9
LOOP = ["train (train.py:43)", "<module> (train.py:79)"]
WAITS = ["all_reduce (torch/distributed/distributed_c10d.py:3252)", *LOOP]
COMPUTES = ["forward (model.py:9)", *LOOP]
STEP_LINES = "".join(
    f"2026-11-21 10:{minute:02}:00 INFO step: {step} loss: 1.0\n"
    for step, minute in enumerate(range(10, 15), start=101)
)


def job(
    folder: Path, *, age: float | None, samples: int = 2, step: int = 40, began: float = 0.0,
    moves: bool = False, phase: str = "train",
) -> Path:  # fmt: skip
    """Rank 1 computes while ranks 0 and 2 wait; every beat is `age` seconds old at the last."""
    for number in range(1, samples + 1):
        where = folder / f"round{number}"
        where.mkdir(parents=True)
        for rank in range(3):
            frames = "\n".join(f"    {f}" for f in (COMPUTES if rank == 1 else WAITS))
            text = f'Process {100 + rank}: python train.py\n\nThread {100 + rank}: "MainThread"\n'
            (where / f"pyspy-trainer-rank{rank}.txt").write_text(f"{text}{frames}\n")
        if age is None:
            continue
        rows = [beat(r, NOW - age, step + (r == 1 and moves) * number) for r in range(3)]
        rows = [{**row, "phase": phase} for row in rows]
        taken = NOW - 5 * (samples - number)
        body = {"schema": "shakedown/beats/1", "round": number, "beats": rows}
        times = {"taken": taken, "began": began}
        (where / "beats-n1.json").write_text(json.dumps({**body, **times}))
    return folder


def beat(rank: int, wall: float, step: int) -> dict[str, Any]:
    return {
        "role": "trainer", "rank": rank, "pid": 100 + rank, "host": "n1", "phase": "train",
        "step": step, "micro_batch": 0, "batch_size": 4, "count": 3 * step, "wall": wall,
        "monotonic": 5.0,
    }  # fmt: skip


def diagnose(*paths: Path) -> Diagnosis:
    return analyze(build_facts(read_paths(list(paths)).records))


def test_rank_in_a_step_no_longer_than_usual_is_not_named(tmp_path: Path) -> None:
    (job(tmp_path, age=30.0) / "train.log").write_text(STEP_LINES)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.state, chosen.cause, list(chosen.ranks)) == ("unknown", "unknown", [])
    assert "heartbeat is 30 s old and a step takes about 60 s" in chosen.sentence
    assert chosen.needed == ["a second sample 150 s later: the same picture then is a hang"]


def test_rank_that_stands_for_many_steps_is_named(tmp_path: Path) -> None:
    (job(tmp_path, age=181.0) / "train.log").write_text(STEP_LINES)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.state, list(chosen.ranks)) == ("hung", [1])
    assert not any("second sample" in text for text in chosen.needed)


@pytest.mark.parametrize(
    ("step_seconds", "age", "named"),
    [(10.0, 20.0, []), (10.0, 40.0, [1]), (0.1, 5.0, []), (0.1, 11.0, [1])],
)
def test_patience_is_three_mean_steps_and_ten_seconds_where_no_log_tells(
    tmp_path: Path, step_seconds: float, age: float, named: list[int]
) -> None:
    job(tmp_path, age=age, step=40, began=NOW - age - 40 * step_seconds)
    assert list(diagnose(tmp_path).chosen.ranks) == named


def test_mean_of_a_few_steps_is_that_of_loading_and_does_not_count(tmp_path: Path) -> None:
    job(tmp_path, age=20.0, step=2, began=NOW - 500.0)
    assert list(diagnose(tmp_path).chosen.ranks) == [1]


def test_rank_that_counts_on_between_samples_is_slow(tmp_path: Path) -> None:
    chosen = diagnose(job(tmp_path, age=1.0, moves=True)).chosen
    assert (chosen.state, chosen.cause, list(chosen.ranks)) == ("slow", "slow_not_hung", [])
    assert "rank 1" in chosen.sentence


def test_one_sample_without_a_steps_length_is_less_sure_and_says_so(tmp_path: Path) -> None:
    one = diagnose(job(tmp_path / "one", age=None, samples=1)).chosen
    two = diagnose(job(tmp_path / "two", age=None, samples=2)).chosen
    assert list(one.ranks) == list(two.ranks) == [1]
    assert one.confidence == pytest.approx(two.confidence - 0.1)
    assert any("cannot tell slow from hung" in text for text in one.needed)
    assert not two.needed


def test_samples_without_heartbeats_ask_for_one_after_three_steps(tmp_path: Path) -> None:
    (job(tmp_path, age=None) / "train.log").write_text(STEP_LINES)
    chosen = diagnose(tmp_path).chosen
    assert list(chosen.ranks) == [1]
    assert any(text.startswith("a second sample 180 s") for text in chosen.needed)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("outcome.json", '{"schema": "shakedown/outcome/1", "stage": "grpo", "attempt": 1, '
         '"state": "hung", "sentence": ""}'),
        ("rank0.log", "[PG 0 Rank 0] Watchdog caught collective operation timeout: "
         "WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1, NumelOut=1)\n"),
    ],
)  # fmt: skip
def test_who_watched_long_enough_is_believed(tmp_path: Path, name: str, text: str) -> None:
    (job(tmp_path, age=30.0) / "train.log").write_text(STEP_LINES)
    (tmp_path / name).write_text(text)
    assert list(diagnose(tmp_path).chosen.ranks) == [1]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (" iteration 3/ 9 | elapsed time per iteration (ms): 23456.0 | lm loss: 1\n", 23.456),
        ('{"step": 3, "step_seconds": 12.5}\n{"step": 4, "step_seconds": 13.5}\n', 13.0),
        ("step:7 - timing_s/step:35.2 - x:1\n", 35.2),
        ("  5%| 3/60 [01:18<24:42, 26.01s/it]\n", 26.01),
        ("step time: 900 ms\n", 0.9),
        (STEP_LINES, 60.0),
        (STEP_LINES.replace(" INFO step:", ",123 - root - INFO - global_step ="), 60.0),
        ("2026-11-21T10:00:00 step 3\n2026-11-21T10:00:09 step 3\n", None),
        ("2026-13-41T10:00:00 step 3\n2026-11-21T10:00:09 step 4\n", None),
        ("step_time: 0\nstep time: 99999999999 s\nelapsed time per iteration (ms): nan\n", None),
        ("2026-11-21T10:00:09 step 9\n2026-11-21T10:00:01 step 99\n", None),
    ],
)
def test_length_of_a_step_is_read_from_logs(text: str, seconds: float | None) -> None:
    found = step_lengths(EvidenceFile(Path("a.log"), "a.log", text.encode()))
    assert [row.seconds for row in found] == ([] if seconds is None else [pytest.approx(seconds)])


def test_collector_notes_when_it_read_the_beats_and_since_when_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "heartbeat"
    Heartbeat(folder, 0).beat(phase="train", step=3)
    collect_local([], tmp_path / "evidence", rounds=1, heartbeats=folder)
    (row,) = [r for r in read_paths([tmp_path / "evidence"]).records if isinstance(r, BeatRecord)]
    assert row.taken >= row.began > 0
    assert row.taken >= row.beat.wall


@pytest.mark.parametrize("value", ["x", -1, 1e999, None, True, [], 10**400])
def test_times_that_cannot_be_true_count_as_not_given(tmp_path: Path, value: object) -> None:
    job(tmp_path, age=30.0, samples=1)
    path = tmp_path / "round1/beats-n1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "taken": value, "began": value}))
    rows = [r for r in read_paths([tmp_path]).records if isinstance(r, BeatRecord)]
    assert {(r.taken, r.began) for r in rows} == {(0.0, 0.0)}
    assert list(diagnose(tmp_path).chosen.ranks) == [1]


def test_metrics_of_a_running_stage_tell_its_steps(tmp_path: Path) -> None:
    attempt = tmp_path / "sft/attempts/1"
    (attempt / "heartbeat").mkdir(parents=True)
    job(attempt / "evidence", age=30.0)
    rows = [json.dumps({"step": n, "loss": 1.0, "step_seconds": 60.0}) for n in range(3)]
    (tmp_path / "sft/metrics.jsonl").write_text("\n".join(rows))
    verdict = diagnose_paths([attempt])
    assert verdict.status == "UNKNOWN"
    assert "a step takes about 60 s" in verdict.summary


@pytest.mark.parametrize(("age", "named"), [(20.0, []), (301.0, [1])])
@pytest.mark.parametrize("phase", ["init", "checkpoint"])
def test_phases_that_are_long_by_nature_have_the_patience_of_a_start(
    tmp_path: Path, phase: str, age: float, named: list[int]
) -> None:
    chosen = diagnose(job(tmp_path, age=age, phase=phase)).chosen
    assert list(chosen.ranks) == named
    assert named or f"{phase} may take 300 s" in chosen.sentence


def test_beats_that_are_repeated_while_waiting_are_no_sign_of_life(tmp_path: Path) -> None:
    (job(tmp_path, age=1.0, phase="rollout_wait") / "train.log").write_text(STEP_LINES)
    assert diagnose(tmp_path).chosen.state == "hung"


# What the processes did between two samples, where no heartbeat tells of their steps


def collected(folder: Path, of_rank_1: Mapping[str, object], seconds: float = 5.0) -> Path:
    """Nobody did anything between the samples but rank 1, what is given."""
    still: dict[str, object] = {"cpu": 3.0, "io": 900, "output": 40, "wchan": "futex_wait_queue"}
    targets = []
    for rank in range(3):
        first, last = (
            {"state": "S", "threads": [], **still, "at": NOW + at} for at in (0.0, seconds)
        )
        if rank == 1:
            last |= of_rank_1
        targets.append(
            {
                "name": f"trainer-rank{rank}", "pid": 100 + rank, "role": "trainer", "rank": rank,
                "states": [first, last], "missed": [],
            }
        )  # fmt: skip
    body = {"schema": "shakedown/collected/1", "host": "n1", "rounds": 2, "targets": targets}
    (folder / "collected-n1.json").write_text(json.dumps(body))
    return folder


def test_rank_that_did_nothing_while_all_others_wait_hangs(tmp_path: Path) -> None:
    chosen = diagnose(collected(job(tmp_path, age=None), {})).chosen
    assert (chosen.state, list(chosen.ranks)) == ("hung", [1])


@pytest.mark.parametrize(
    ("did", "told"),
    [
        ({"cpu": 7.5}, "rank 1 used 90% of a core"),
        ({"io": 950}, "rank 1 read or wrote 50 bytes"),
        ({"output": 60}, "rank 1 printed"),
        ({"wchan": "hrtimer_nanosleep"}, "rank 1 sleeps until a timer ends"),
        ({"state": "R"}, "rank 1 is ready to run, and got no CPU"),
    ],
)
def test_rank_that_did_something_may_be_slow_and_is_not_named(
    tmp_path: Path, did: dict[str, object], told: str
) -> None:
    chosen = diagnose(collected(job(tmp_path, age=None), did)).chosen
    assert (chosen.cause, chosen.state, list(chosen.ranks)) == ("unknown", "unknown", [])
    assert told in chosen.sentence
    assert "--gap 300" in chosen.needed[0]


def test_rank_that_works_at_one_place_for_long_is_busy(tmp_path: Path) -> None:
    chosen = diagnose(collected(job(tmp_path, age=None), {"cpu": 390.0}, 400.0)).chosen
    assert (chosen.state, list(chosen.ranks)) == ("hung", [1])


@pytest.mark.parametrize("value", ["x", -1, None, float("nan"), True])
def test_counts_that_cannot_be_true_are_no_counts(tmp_path: Path, value: object) -> None:
    """The samples alone decide then, as those that somebody pasted."""
    chosen = diagnose(collected(job(tmp_path, age=None), {"cpu": value})).chosen
    assert (chosen.state, list(chosen.ranks)) == ("hung", [1])


def test_what_is_not_yet_said_stands_among_the_candidates(tmp_path: Path) -> None:
    found = diagnose(collected(job(tmp_path, age=None), {"cpu": 7.5})).to_json()
    assert found["culprits"]["ranks"] == []
    (row,) = found["candidates"]
    assert (row["ranks"], row["cause"], row["weight"]) == ([1], "missing_rank", 0.8)
    assert (row["nodes"], row["roles"], row["against"]) == ([], [], [])
    assert "rank 1" in row["for"][0]


def looked_at(folder: Path, frames: list[str], *, active: bool, waiting: int) -> Path:
    """One look at rank 0 in `frames` and at `waiting` ranks in a collective."""
    state = "active" if active else "idle"
    for rank in range(waiting + 1):
        path = "\n".join(f"    {f}" for f in (WAITS if rank else frames))
        mark = state if rank == 0 else "idle"
        text = f'Process {9 + rank}: python t.py\n\nThread {9 + rank} ({mark}): "MainThread"\n'
        (folder / f"pyspy_rank{rank}.txt").write_text(f"{text}{path}\n")
    return folder


@pytest.mark.parametrize(
    ("active", "waiting", "named"), [(True, 1, []), (False, 1, [0]), (True, 3, [0])]
)
def test_one_of_two_that_computes_at_the_only_look_is_not_named(
    tmp_path: Path, active: bool, waiting: int, named: list[int]
) -> None:
    looked_at(tmp_path, COMPUTES, active=active, waiting=waiting)
    assert list(diagnose(tmp_path).chosen.ranks) == named


C10D = "torch/distributed/distributed_c10d.py"
ASKS_FOR_ITS_RANK = [
    f"_WorldMeta.WORLD ({C10D}:819)",
    f"_get_default_group ({C10D}:1430)",
    f"get_rank ({C10D}:2572)",
    "reward (train.py:27)",
    *LOOP,
]


def test_rank_that_looks_up_its_number_waits_for_nobody(tmp_path: Path) -> None:
    looked_at(tmp_path, ASKS_FOR_ITS_RANK, active=True, waiting=3)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.state, chosen.cause, list(chosen.ranks)) == ("hung", "rank_busy", [0])
    assert "reward (train.py:27)" in chosen.sentence


def test_call_with_objects_is_told_by_its_own_name(tmp_path: Path) -> None:
    """Whatever helper of it was at work in the moment of the look."""
    inside = [f"_get_pg_default_device ({C10D}:931)", f"gather_object ({C10D}:3534)", *LOOP]
    chosen = diagnose(looked_at(tmp_path, inside, active=True, waiting=3)).chosen
    assert "gather_object" in chosen.sentence


MAPS = ["apply (prepare.py:8)", "Dataset._map_single (datasets/arrow_dataset.py:3961)", *LOOP]


@pytest.mark.parametrize(
    ("active", "percent", "state"), [(True, 40, "slow"), (True, 100, "hung"), (False, 40, "hung")]
)
def test_rank_that_computes_beside_a_bar_that_is_not_through_is_slow(
    tmp_path: Path, active: bool, percent: int, state: str
) -> None:
    looked_at(tmp_path, MAPS, active=active, waiting=3)
    bar = f"Running tokenizer: {percent}%|##  | {percent}/100 [00:09<00:14, 4.1 examples/s]\n"
    (tmp_path / "train.log").write_text(bar)
    assert diagnose(tmp_path).chosen.state == state


def test_rank_that_waits_for_the_lock_of_a_build_is_busy(tmp_path: Path) -> None:
    lock = ["FileBaton.wait (torch/utils/file_baton.py:49)", "load (setup.py:3)", *LOOP]
    chosen = diagnose(looked_at(tmp_path, lock, active=False, waiting=3)).chosen
    assert (chosen.cause, list(chosen.ranks)) == ("rank_busy", [0])


RAISED = (
    "[rank1]: Traceback (most recent call last):\n"
    '[rank1]:   File "/home/user/train.py", line 9, in step\n'
    "[rank1]:     raise ValueError(x)\n"
    "[rank1]: ValueError: bad batch\n"
)


@pytest.mark.parametrize(
    ("listed", "state"),
    [
        ("", "exited"),
        ("  PID STAT ELAPSED COMMAND\n 4100 Sl 02:10:11 python -u train.py\n", "hung"),
        ("  PID USER PR NI VIRT RES SHR S %CPU %MEM TIME+ COMMAND\n 41 u 20 0 1g 1g 1g R 99.0 0.1 "
         "22:48.31 python\n", "hung"),
        ("  PID STAT ELAPSED COMMAND\n 4100 Ss 02:10:11 -bash\n", "exited"),
        ("  PID STAT ELAPSED COMMAND\n 4100 Z 02:10:11 [python] <defunct>\n", "exited"),
        ("JOBID PARTITION NAME USER ST TIME NODES NODELIST(REASON)\n 7 gpu a u R 2:10 1 n1\n",
         "hung"),
        ("JOBID PARTITION NAME USER ST TIME NODES NODELIST(REASON)\n 8 gpu a u PD 0:00 1 (Resources"
         ")\n", "exited"),
    ],
)  # fmt: skip
def test_job_of_which_a_list_shows_a_process_has_not_ended(
    tmp_path: Path, listed: str, state: str
) -> None:
    (tmp_path / "train.log").write_text(RAISED)
    (tmp_path / "listed.txt").write_text(listed)
    chosen = diagnose(tmp_path).chosen
    assert (chosen.state, chosen.cause, list(chosen.ranks)) == (state, "user_code", [1])


def seen(folder: Path, *, prints: int = 0, **stacks: str) -> Path:
    """Two samples of ranks, each with its frames, innermost first; `gone`: no process is left.

    Of frames with ` then ` between the second sample has the later ones.
    """
    rows = []
    for name, frames in stacks.items():
        rank = int(name.removeprefix("rank"))
        target = {"name": f"trainer-{name}", "pid": 100 + rank, "role": "trainer", "rank": rank}
        state: dict[str, Any] = {"state": "X" if frames == "gone" else "S", "wchan": ""}
        done = {"cpu": 1.0, "io": 0, "timed": 0}
        states = [
            {**state, "threads": [], "at": NOW + number, **done, "output": number * prints}
            for number in (1, 2)
        ]
        rows.append({**target, "states": states})
        for number in (1, 2) if frames != "gone" else ():
            where = folder / f"round{number}"
            where.mkdir(exist_ok=True)
            head = f"Process {100 + rank}: python train.py\n\nThread {100 + rank} (active): "
            path = frames.split(" then ")[number - 1 :][:1] or [frames]
            text = f'{head}"MainThread"\n' + "".join(f"    {f}\n" for f in path[0].split(" < "))
            (where / f"pyspy-trainer-rank{rank}.txt").write_text(text)
    body = {"schema": "shakedown/collected/1", "host": "n1", "targets": rows, "missed": []}
    (folder / "collected-n1.json").write_text(json.dumps(body))
    return folder


@pytest.mark.parametrize(
    ("other", "prints", "state", "named"),
    [
        ("evaluate (train.py:30) < <module> (train.py:79)", 80, "unknown", []),
        ("evaluate (train.py:30) < <module> (train.py:79)", 0, "hung", [1]),
        (" < ".join(WAITS), 80, "hung", [1]),
    ],
)
def test_rank_that_ended_without_a_word_is_named_once_another_one_waits_or_does_nothing(
    tmp_path: Path, other: str, prints: int, state: str, named: list[int]
) -> None:
    chosen = diagnose(seen(tmp_path, prints=prints, rank0=other, rank1="gone")).chosen
    assert (chosen.state, list(chosen.ranks)) == (state, named)


@pytest.mark.parametrize(
    ("state", "last", "cause"),
    [("failed", "", "user_code"), ("failed", "step 7\n", "unknown"), ("hung", "", "unknown")],
)
def test_the_last_word_of_a_stage_that_failed_is_told_also_of_a_process_without_a_rank(
    tmp_path: Path, state: OutcomeState, last: str, cause: str
) -> None:
    Outcome("lab", 1, state, "exit code 1").write(tmp_path / "outcome.json")
    error = RAISED.replace("[rank1]: ", "")
    (tmp_path / "trainer-launch.log").write_text(f"step 6\n{error}{last}")
    chosen = diagnose(tmp_path).chosen
    assert (chosen.cause, list(chosen.ranks)) == (cause, [])
    assert ("ValueError: bad batch at" in chosen.sentence) == (cause == "user_code")


@pytest.mark.parametrize(
    ("stalled", "frames", "state"),
    [
        ({}, "forward (model.py:9) < <module> (train.py:79)", "unknown"),
        ({}, "synchronize (torch/cuda/__init__.py:9) < step (train.py:7)", "hung"),
        ({"still": []}, "forward (model.py:9) < <module> (train.py:79)", "hung"),
    ],
)
def test_a_watch_that_sees_no_steps_calls_nobody_hung_who_computes(
    tmp_path: Path, stalled: dict[str, object], frames: str, state: str
) -> None:
    outcome = Outcome("job 7", 1, "hung", "nothing was printed for 400 s", stalled=stalled)
    outcome.write(tmp_path / "outcome.json")
    chosen = diagnose(seen(tmp_path, rank0=frames)).chosen
    assert (chosen.state, list(chosen.ranks)) == (state, [])


@pytest.mark.parametrize(
    ("frames", "stalled", "state", "named"),
    [
        ("norm (m.py:1) < score (t.py:9) then add (m.py:5) < score (t.py:9)", {}, "unknown", []),
        ("loop (t.py:3) < <module> (t.py:9) then loop (t.py:4) < <module> (t.py:9)", {}, "hung",
         [0]),
        ("stat (/usr/lib64/python3.12/pathlib.py:1) < polls (t.py:9) then wait (queue.py:5) < "
         "polls (t.py:9)", {}, "hung", [0]),
        ("linear (m.py:3) < score (t.py:9) then score (t.py:9)", {}, "unknown", []),
        ("norm (m.py:1) < score (t.py:9) then add (m.py:5) < score (t.py:9)", {"still": []}, "hung",
         [0]),
    ],
)  # fmt: skip
def test_rank_that_works_in_several_functions_while_others_wait_is_slow_for_whoever_sees_no_steps(
    tmp_path: Path, frames: str, stalled: dict[str, object], state: str, named: list[int]
) -> None:
    outcome = Outcome("job 7", 1, "hung", "nothing was printed for 400 s", stalled=stalled)
    outcome.write(tmp_path / "outcome.json")
    waits = " < ".join(WAITS)
    chosen = diagnose(seen(tmp_path, rank0=frames, rank1=waits)).chosen
    assert (chosen.state, list(chosen.ranks)) == (state, named)
