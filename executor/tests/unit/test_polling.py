"""When Slurm is asked, and what its silence and its forgetting mean."""

from pathlib import Path

import pytest
from entries import NAME, RUN, entry
from slurm_programs import Programs

from snakemake_executor_plugin_submitit.polling import Poller
from snakemake_executor_plugin_submitit.slurm import JobState
from snakemake_executor_plugin_submitit.status import judge

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NO_DATABASE = "sacct: error: slurmdbd: Connection refused"
PATIENCE = 900.0


ENTRIES = [entry("7_0"), entry("7_1"), entry("8")]
START = "2026-03-14T10:15:00"
RUNNING = "".join(f"{e.job_id}|RUNNING|None|n1|{START}|{NAME}\n" for e in ENTRIES)


class Watched:
    """A poller every 10 s whose time is set by hand, and what it has said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.poller = Poller(10.0, PATIENCE, say=self.said.append, clock=lambda: self.now)

    def ask_after_pauses(self, times: int) -> list[float]:
        """Ask as soon as it is due; the pauses in seconds that this took."""
        pauses = []
        for _ in range(times):
            start = self.now
            while not self.poller.is_due(soon=False):
                self.now += 1.0
            pauses.append(self.now - start)
            self.poller.ask(ENTRIES)
        return pauses


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_jobs_that_squeue_knows_cost_one_call(programs: Programs, watched: Watched) -> None:
    programs.answer("squeue", RUNNING)
    programs.answer("sacct")

    answer = watched.poller.ask(ENTRIES)

    assert answer == {e: JobState("RUNNING", "None", "n1", START, NAME) for e in ENTRIES}
    assert programs.called("squeue") == 1
    assert programs.called("sacct") == 0


def test_all_that_squeue_has_forgotten_cost_one_sacct(programs: Programs, watched: Watched) -> None:
    programs.answer("squeue", f"8|RUNNING|None|n1|{START}|{NAME}\n")
    programs.answer("sacct", f"7_0|TIMEOUT|0:0|n2|{NAME}\n7_1|FAILED|1:0|n2|stranger\n")

    answer = watched.poller.ask(ENTRIES)

    assert answer == {
        entry("8"): JobState("RUNNING", "None", "n1", START, NAME),
        entry("7_0"): JobState("TIMEOUT", "", "n2", name=NAME),
        entry("7_1"): None,
    }
    assert programs.called("squeue") == 2  # that they are gone is asked for by their ids alone
    assert programs.called("sacct") == 1


@pytest.mark.parametrize("name", ["", "train", f"{NAME}0", f"other-{NAME}", f"{NAME}|x"])
def test_a_job_of_another_name_is_not_ours(programs: Programs, watched: Watched, name: str) -> None:
    programs.answer("squeue", f"8|RUNNING|None|n1|{START}|{name}\n")
    programs.answer("sacct")

    assert watched.poller.ask([entry("8")]) == {entry("8"): None}


def test_own_jobs_are_known_by_their_ids_whatever_slurm_calls_them(programs: Programs) -> None:
    """A site's plugin may rename jobs."""
    noted: list[tuple[str, str]] = []
    poller = Poller(
        10.0,
        PATIENCE,
        say=lambda _words: None,
        run=RUN,
        note_name=lambda job, name: noted.append((job.name, name)),
    )
    programs.answer("squeue", "7_0|RUNNING|None|n1|N/A|lab\n7_1|RUNNING|None|n1|N/A|lab\n")
    programs.answer("sacct", "8|TIMEOUT|0:0|n2|lab\n")

    first = poller.ask(ENTRIES)
    second = poller.ask(ENTRIES)

    assert first == second
    assert first is not None
    assert {job.job_id: state.state for job, state in first.items() if state} == {
        "7_0": "RUNNING",
        "7_1": "RUNNING",
        "8": "TIMEOUT",
    }
    assert noted == [(NAME, "lab")]


@pytest.mark.parametrize(("known_as", "found"), [("lab", True), ("", False), ("other", False)])
def test_an_earlier_runs_job_is_known_by_the_name_that_it_was_seen_under(
    programs: Programs, watched: Watched, known_as: str, found: bool
) -> None:
    programs.answer("squeue", "7_0|RUNNING|None|n1|N/A|lab\n")
    programs.answer("sacct", "8|FAILED|1:0|n1|lab\n")
    jobs = [entry(job_id, known_as=known_as) for job_id in ("7_0", "8")]

    answer = watched.poller.ask(jobs)

    assert answer is not None
    assert [answer[job] is not None for job in jobs] == [found, found]


def test_own_jobs_are_cancelled_by_id_and_earlier_ones_where_slurm_has_them(
    programs: Programs,
) -> None:
    programs.answer("squeue", f"8|RUNNING|None|n1|N/A|{NAME}\n9|RUNNING|None|n1|N/A|stranger\n")
    programs.answer("scancel")
    earlier = [entry(job_id, run="20260101-000000-ffffffff") for job_id in ("8", "9")]
    poller = Poller(10.0, PATIENCE, say=lambda _words: None, run=RUN)

    poller.cancel([entry("7_0"), entry("1", cluster="east"), *earlier])

    cancelled = [call for call in programs.calls if call.startswith("scancel")]
    assert cancelled == ["scancel --quiet 7_0 8", "scancel --quiet --clusters east 1"]


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_a_job_that_the_controller_lost_does_not_run_for_ever(
    programs: Programs, watched: Watched, state: str
) -> None:
    programs.answer("squeue")
    programs.answer("sacct", f"8|{state}|0:0|n1|{NAME}\n")

    answer = watched.poller.ask([entry("8")])

    assert answer == {entry("8"): None}
    assert judge(None, answer[entry("8")]).outcome == "unclear"


def test_polls_keep_their_distance(programs: Programs, watched: Watched) -> None:
    programs.answer("squeue", RUNNING)

    assert watched.ask_after_pauses(3) == [10, 10, 10]


def test_while_jobs_come_and_end_slurm_is_asked_less_often_but_asked(
    programs: Programs, watched: Watched
) -> None:
    programs.answer("squeue", RUNNING)
    watched.poller.ask(ENTRIES)
    due = []
    for watched.now in range(1, 100):
        watched.poller.note_progress()
        due.append(watched.poller.is_due(soon=False))

    first = due.index(True) + 1

    assert first > 10
    assert first < 99


def test_progress_keeps_no_failure_and_no_silence_waiting(
    programs: Programs, watched: Watched
) -> None:
    programs.answer("squeue", RUNNING)
    watched.poller.ask(ENTRIES)
    watched.now = 2.0
    watched.poller.note_progress()
    failure = watched.poller.is_due(soon=True)
    programs.answer("squeue", error=DOWN)
    watched.poller.ask(ENTRIES)
    watched.now = 4.0
    watched.poller.note_progress()

    assert failure
    assert watched.poller.is_due(soon=False)


def test_a_failure_on_file_is_asked_about_sooner(programs: Programs, watched: Watched) -> None:
    programs.answer("squeue", RUNNING)
    watched.poller.ask(ENTRIES)

    watched.now = 2.0

    assert watched.poller.is_due(soon=True)
    assert not watched.poller.is_due(soon=False)


def test_silence_and_its_end_are_told_once(programs: Programs, watched: Watched) -> None:
    programs.answer("squeue", error=DOWN)
    unanswered = [watched.poller.ask(ENTRIES) for _ in range(3)]
    programs.answer("squeue", RUNNING)
    watched.poller.ask(ENTRIES)
    watched.poller.ask(ENTRIES)

    assert unanswered == [None] * 3
    silence, end = watched.said
    assert "Unable to contact" in silence
    assert "900 s" in silence
    assert end == "Slurm answers again"


def test_a_silent_slurm_is_asked_at_growing_pauses(programs: Programs, watched: Watched) -> None:
    programs.answer("squeue", error=DOWN)

    assert watched.ask_after_pauses(8) == [10, 2, 4, 8, 16, 32, 60, 60]


def test_after_an_answer_the_pauses_are_the_usual_again(
    programs: Programs, watched: Watched
) -> None:
    programs.answer("squeue", error=DOWN)
    watched.ask_after_pauses(8)
    programs.answer("squeue", RUNNING)
    watched.ask_after_pauses(1)

    assert watched.ask_after_pauses(2) == [10, 10]


def test_slurm_is_given_up_after_the_patience_and_not_before(
    programs: Programs, watched: Watched
) -> None:
    programs.answer("squeue", error=DOWN)
    watched.now = 50.0
    watched.poller.ask(ENTRIES)

    watched.now = 50.0 + PATIENCE
    before = watched.poller.is_given_up
    watched.now += 1
    after = watched.poller.is_given_up
    programs.answer("squeue", RUNNING)
    watched.poller.ask(ENTRIES)

    assert not before
    assert after
    assert not watched.poller.is_given_up


@pytest.mark.parametrize("installed", [True, False])
def test_without_accounting_sacct_is_asked_once(
    programs: Programs, watched: Watched, installed: bool
) -> None:
    programs.answer("squeue")
    if installed:
        programs.answer("sacct", error="Slurm accounting storage is disabled")

    answers = [watched.poller.ask([entry("8")]) for _ in range(3)]

    assert answers == [{entry("8"): None}] * 3
    assert programs.called("sacct") == installed
    assert watched.said == []


def test_while_the_database_is_down_forgotten_jobs_count_as_unfinished(
    programs: Programs, watched: Watched
) -> None:
    programs.answer("squeue")
    programs.answer("sacct", error=NO_DATABASE)

    first = watched.poller.ask([entry("8")])
    watched.now = PATIENCE
    last = watched.poller.ask([entry("8")])
    watched.now += 1
    too_late = watched.poller.ask([entry("8")])

    assert first is not None
    assert judge(None, first[entry("8")]).outcome == "running"
    assert last == first
    assert too_late == {entry("8"): None}
    assert len(watched.said) == 1
    assert not watched.poller.is_given_up


def test_a_database_that_came_back_gets_the_whole_patience_again(
    programs: Programs, watched: Watched
) -> None:
    programs.answer("squeue")
    programs.answer("sacct", error=NO_DATABASE)
    watched.poller.ask([entry("8")])
    programs.answer("sacct", f"8|COMPLETED|0:0|n1|{NAME}\n")
    watched.now = PATIENCE
    known = watched.poller.ask([entry("8")])
    programs.answer("sacct", error=NO_DATABASE)
    watched.now += 1

    unfinished = watched.poller.ask([entry("8")])

    assert known == {entry("8"): JobState("COMPLETED", "", "n1", name=NAME)}
    assert unfinished is not None
    assert judge(None, unfinished[entry("8")]).outcome == "running"


def test_jobs_of_several_clusters_are_told_apart_by_one_call_each(
    programs: Programs, watched: Watched
) -> None:
    programs.answer("squeue", f"CLUSTER: east\n8|RUNNING|None|n1|{START}|{NAME}\n")
    programs.answer("sacct")
    here, east = entry("8", name="other"), entry("8", cluster="east")

    answer = watched.poller.ask([here, east])

    assert answer is not None
    assert answer[here] is None
    assert answer[east] is not None
    asked = [call for call in programs.calls if call.startswith("squeue")]
    assert ["--clusters east" in call for call in asked] == [False, True]
