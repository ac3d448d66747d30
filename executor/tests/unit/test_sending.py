"""What the outbox's thread does with ready jobs: every one is reported, whatever happens."""

import errno
import logging
from pathlib import Path

import pytest
from sender_desk import Cluster, Desk, ready
from slurm_programs import Programs

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.journal import name_ending, open_runs
from snakemake_executor_plugin_submitit.outbox import StoppedError
from snakemake_executor_plugin_submitit.slurm import SlurmError
from snakemake_executor_plugin_submitit.work import Prepared

TOO_MANY = (
    "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job"
    " violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)
NO_ACCOUNT = (
    "sbatch: error: Batch job submission failed: Invalid account or account/partition combination"
    " specified"
)
TOO_LARGE = "sbatch: error: Batch job submission failed: Invalid job array specification"
BUSY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
WRONG = "sbatch: error: invalid partition specified: moon"


def many(count: int) -> list[Prepared]:
    return [ready(str(number)) for number in range(count)]


def test_jobs_with_equal_parameters_go_out_together(desk: Desk, cluster: Cluster) -> None:
    sender = desk.sender()
    assert not sender.has_submitted

    sender.send([ready("a"), ready("b", parameters={"mem": "2M"}), ready("c")])

    assert [batch.commands for batch in cluster.batches] == [
        ["make a", "make c"],
        ["make b"],
    ]
    assert desk.reports.job_ids == {"a": "1_0", "c": "1_1", "b": "2_0"}
    assert desk.reports.taken == set()
    assert sender.has_submitted


def test_a_job_with_checkpoints_shares_no_array_with_one_without(
    desk: Desk, cluster: Cluster
) -> None:
    desk.sender(requeue_limit=3).send([ready("a"), ready("b", checkpoints=True)])

    assert [batch.requeue_limit for batch in cluster.batches] == [0, 3]


def test_the_journal_has_every_job_that_was_reported(desk: Desk, cluster: Cluster) -> None:
    desk.sender().send(many(3))
    desk.journal.close()

    (run,) = open_runs(desk.journal.base, desk.journal.place)

    noted = {entry.identity.makes[0]: entry.job_id for entry in run.jobs.values()}
    assert noted == desk.reports.job_ids
    assert run.lost == {}
    assert {entry.name for entry in run.jobs.values()} == {cluster.batches[0].name}


def test_an_array_is_no_larger_than_the_setting(desk: Desk, cluster: Cluster) -> None:
    desk.sender(array_size=4).send(many(10))

    assert cluster.tried == [4, 4, 2]
    assert len(desk.reports.job_ids) == 10
    assert len({batch.name for batch in cluster.batches}) == 3


def test_the_cluster_is_asked_for_its_limit_when_there_are_very_many(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    programs.answer("scontrol", "MaxArraySize = 1101\n")
    sender = desk.sender()

    sender.send(many(1000))
    few = programs.called("scontrol")
    sender.send(many(1200))

    assert few == 0
    assert cluster.tried == [1000, 1100, 100]
    assert programs.called("scontrol") == 1


def test_an_array_that_is_too_large_is_split(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    programs.answer("scontrol", "MaxArraySize = 5\n")
    cluster.refuse = lambda batch: SlurmError(TOO_LARGE) if len(batch.commands) > 4 else None

    desk.sender().send(many(10))

    assert cluster.tried == [10, 4, 4, 2]
    assert len(desk.reports.job_ids) == 10
    assert desk.reports.words == {}


def test_an_array_is_halved_where_the_clusters_limit_does_not_explain_it(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    programs.answer("scontrol", "MaxArraySize = 1001\n")
    cluster.refuse = lambda batch: SlurmError(TOO_LARGE) if len(batch.commands) > 4 else None

    desk.sender().send(many(32))

    assert cluster.tried == [32, 16, 8, *[4] * 8]
    assert len(desk.reports.job_ids) == 32


def test_splitting_ends_though_the_cluster_refuses_every_array(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    programs.answer("scontrol", "MaxArraySize = 1001\n")
    cluster.refuse = lambda _batch: SlurmError(TOO_LARGE)

    desk.sender().send(many(3))

    assert cluster.tried == [3, 1, 1, 1]
    assert set(desk.reports.words) == {"0", "1", "2"}


def test_a_refusal_is_reported_for_every_job_of_the_array_and_no_other(
    desk: Desk, cluster: Cluster
) -> None:
    bad = {"partition": "moon"}
    cluster.refuse = lambda batch: SlurmError(WRONG) if batch.parameters == bad else None

    desk.sender().send([ready("a", parameters=bad), ready("b"), ready("c", parameters=bad)])

    assert set(desk.reports.words) == {"a", "c"}
    assert desk.reports.words["a"].startswith("sbatch did not accept it: ")
    assert "moon" in desk.reports.words["c"]
    assert set(desk.reports.job_ids) == {"b"}
    assert desk.pauses == []


def test_a_busy_controller_is_asked_again_after_what_came_through_is_cancelled(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    answers = iter([SlurmError(BUSY), None])
    cluster.refuse = lambda _batch: next(answers)
    unheard = f"train{name_ending(desk.journal.run, 1)}"
    rows = (f"5_0|PENDING|None||N/A|{unheard}", f"6_0|PENDING|None||N/A|{unheard}0", "7|RUNNING")
    programs.answer("squeue", "\n".join(rows))

    desk.sender().send([ready("a")])

    assert desk.pauses == [2]
    assert [call for call in programs.calls if call.startswith("scancel")] == ["scancel --quiet 5"]
    assert desk.reports.job_ids == {"a": "1_0"}
    # Should the unheard one appear later still, it finds no files of its own name.
    assert cluster.batches[0].name == f"train{name_ending(desk.journal.run, 2)}"


def test_no_answer_within_the_patience_is_reported_as_that(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    cluster.refuse = lambda _batch: SlurmError(BUSY)

    desk.sender(patience=0).send(many(2))

    assert set(desk.reports.words) == {"0", "1"}
    assert desk.reports.words["0"].startswith("no answer to sbatch: ")
    assert programs.calls == []


def test_an_unexpected_error_is_reported_for_every_job(desk: Desk, cluster: Cluster) -> None:
    cluster.refuse = lambda _batch: KeyError("surprise")

    desk.sender().send(many(2))

    assert set(desk.reports.words) == {"0", "1"}
    assert "KeyError: 'surprise'" in desk.reports.words["1"]


def test_jobs_that_cannot_be_noted_are_cancelled_and_reported(
    desk: Desk, cluster: Cluster, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_entries: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    name = f"train{name_ending(desk.journal.run, 1)}"
    programs.answer("squeue", f"1_0|RUNNING|None|n1|N/A|{name}\n")
    monkeypatch.setattr(desk.journal, "jobs", fail)

    desk.sender().send([ready("a")])

    assert len(cluster.batches) == 1
    assert programs.called("scancel") == 1
    assert "No space left" in desk.reports.words["a"]
    assert desk.reports.job_ids == {}


def test_the_end_of_the_run_interrupts_the_patience(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    def stopped(_seconds: float) -> None:
        raise StoppedError

    cluster.refuse = lambda _batch: SlurmError(BUSY)
    sender = desk.sender()
    sender.sleep = stopped

    with pytest.raises(StoppedError):
        sender.send(many(2))

    assert desk.reports.words == {}
    assert cluster.tried == [2]
    assert programs.calls == []


def test_lost_nodes_and_those_of_the_file_are_excluded_as_they_are_now(
    desk: Desk, cluster: Cluster, tmp_path: Path
) -> None:
    bad = tmp_path / "bad_nodes.txt"
    sender = desk.sender()

    sender.send([ready("a", exclude_file=bad)])
    bad.write_text("n[4-5]\n")
    desk.nodes.lost.add("n1")
    own = {"exclude": "n9"}
    sender.send([ready("b", exclude_file=bad, parameters=own), ready("c")])

    assert [batch.parameters.get("exclude") for batch in cluster.batches] == [
        None,
        "n9,n1,n[4-5]",
        "n1",
    ]


@pytest.fixture
def five_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "all_nodes", lambda: {"n1", "n2", "n3", "n4", "n5"})
    monkeypatch.setattr(slurm, "expand", lambda text: text.split(",") if text else [])


@pytest.mark.usefixtures("five_nodes")
def test_a_job_runs_on_the_nodes_of_its_file_alone(
    desk: Desk, cluster: Cluster, tmp_path: Path
) -> None:
    only, bad = tmp_path / "good_nodes.txt", tmp_path / "bad_nodes.txt"
    only.write_text("n1\nn2\nn3\n")
    bad.write_text("n3\n")

    desk.sender().send(
        [ready("a", node_file=only, exclude_file=bad, parameters={"nodes": 2}), ready("b")]
    )

    assert [batch.parameters.get("exclude") for batch in cluster.batches] == ["n3,n4,n5", None]


@pytest.mark.usefixtures("five_nodes")
def test_a_file_that_names_too_few_nodes_binds_nobody(
    desk: Desk, cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    only = tmp_path / "good_nodes.txt"
    only.write_text("n1\n")

    desk.sender().send([ready("a", node_file=only, parameters={"nodes": 2})])

    assert [batch.parameters.get("exclude") for batch in cluster.batches] == [None]
    assert "it may run on others" in caplog.text


def test_a_bad_file_of_nodes_fails_its_own_jobs_alone(
    desk: Desk, cluster: Cluster, tmp_path: Path
) -> None:
    bad = tmp_path / "bad_nodes.txt"
    bad.write_text("$(reboot)\n")

    desk.sender().send([ready("a", exclude_file=bad), ready("b")])

    assert "is not a node name" in desk.reports.words["a"]
    assert desk.reports.job_ids == {"b": "1_0"}
    assert len(cluster.batches) == 1


def test_an_array_above_a_limit_on_queued_jobs_goes_out_in_parts(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    """As a whole it would be refused for ever."""
    programs.answer("scontrol", "MaxArraySize = 1001\n")
    cluster.refuse = lambda batch: SlurmError(TOO_MANY) if len(batch.commands) > 3 else None

    desk.sender().send(many(8))

    assert cluster.tried == [8, 4, 2, 4, 2, 4, 2, 2]
    assert len(desk.reports.job_ids) == 8
    assert desk.pauses == []


def test_a_full_queue_is_waited_for_with_a_single_job(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    answers = iter([SlurmError(TOO_MANY), None])
    cluster.refuse = lambda _batch: next(answers)

    desk.sender().send([ready("a")])

    assert desk.clock() == pytest.approx(2)
    assert desk.reports.job_ids == {"a": "1_0"}


def test_a_queue_full_of_own_jobs_costs_no_patience(
    desk: Desk, cluster: Cluster, programs: Programs, caplog: pytest.LogCaptureFixture
) -> None:
    def end_one() -> None:
        if len(desk.pauses) % 50 == 0:
            desk.reports.live.pop()

    caplog.set_level(logging.INFO)
    desk.meanwhile = end_one
    cluster.refuse = lambda batch: (
        SlurmError(TOO_MANY) if desk.reports.living() + len(batch.commands) > 3 else None
    )

    desk.sender(patience=0).send(many(8))

    assert len(desk.reports.job_ids) == 8
    assert desk.reports.words == {}
    assert desk.clock() > 200
    assert caplog.text.count("waiting until they end") == 1
    assert "trying again" not in caplog.text
    # Nothing was submitted by a refusal: there is nothing to look for.
    assert programs.calls == []
    desk.journal.close()
    (run,) = open_runs(desk.journal.base, desk.journal.place)
    assert run.lost == {}


def test_a_job_that_ends_makes_room_at_once(desk: Desk, cluster: Cluster) -> None:
    """Not after a pause of a minute, which grows while the queue is full."""
    desk.meanwhile = lambda: desk.reports.live.clear() if desk.clock() > 200 else None
    cluster.refuse = lambda _batch: SlurmError(TOO_MANY) if desk.reports.living() else None

    desk.sender().send([ready("a")])
    desk.sender().send([ready("b")])

    assert set(desk.reports.job_ids) == {"a", "b"}
    assert desk.clock() < 203


def test_a_queue_full_of_other_jobs_is_given_up_after_the_patience(
    desk: Desk, cluster: Cluster
) -> None:
    cluster.refuse = lambda _batch: SlurmError(TOO_MANY)

    desk.sender(patience=0).send(many(2))

    assert set(desk.reports.words) == {"0", "1"}
    assert "AssocMaxSubmitJobLimit" in desk.reports.words["0"]
    assert cluster.tried == [2, 1, 1]


def test_after_a_full_queue_too_what_came_through_unheard_is_cancelled(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    """Such as a batch whose file could not be put into its place."""
    answers = iter([SlurmError(TOO_MANY), OSError(errno.EIO, "Input/output error"), None])
    cluster.refuse = lambda _batch: next(answers)
    unheard = f"train{name_ending(desk.journal.run, 2)}"
    programs.answer("squeue", f"5|PENDING|None||N/A|{unheard}\n")

    desk.sender().send([ready("a")])

    assert "scancel --quiet 5" in programs.calls
    assert desk.reports.job_ids == {"a": "1_0"}


def test_where_slurm_wants_an_account_the_users_own_is_tried_once(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    programs.answer("sacctmgr", "lab\n")
    cluster.refuse = lambda batch: (
        None if batch.parameters.get("account") == "lab" else SlurmError(NO_ACCOUNT)
    )
    sender = desk.sender()

    sender.send([ready("a")])
    sender.send([ready("b"), ready("c", parameters={"mem": "1M", "account": "moon"})])

    assert desk.reports.job_ids == {"a": "1_0", "b": "2_0"}
    assert "Invalid account" in desk.reports.words["c"]
    assert programs.called("sacctmgr") == 1


def test_without_an_account_to_guess_the_refusal_is_reported(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    programs.answer("sacctmgr")
    programs.answer("sacct")
    cluster.refuse = lambda _batch: SlurmError(NO_ACCOUNT)

    desk.sender().send([ready("a")])

    assert "Invalid account" in desk.reports.words["a"]
    assert cluster.tried == [1]
