"""Why jobs wait: Slurm 22.05's own lines, in plain English, and how often they are said."""

import pytest

from snakemake_executor_plugin_submitit.waiting import Pending, WaitReport, explain

# squeue --array --format '%i|%T|%r|%N|%S|%j' of a real cluster, job by job provoked.
SQUEUE = """\
26711144|PENDING|JobHeldUser||N/A|hold
26711175|PENDING|JobHeldAdmin||N/A|heldadmin
26711177|PENDING|job requeued in held state||2026-11-22T08:50:30|requeuehold
26711181|SPECIAL_EXIT|job requeued in held state||2026-11-22T08:50:30|special
26711198|PENDING|launch failed requeued held||2026-11-22T08:52:02|launch
26711145|PENDING|PartitionConfig||N/A|big
26711172|PENDING|PartitionTimeLimit||N/A|t
26711173|PENDING|PartitionNodeLimit||N/A|n
26711174|PENDING|MaxMemPerLimit||N/A|m
26711193|PENDING|BadConstraints||N/A|feat
26711197|PENDING|InvalidAccount||N/A|acc
26711165|PENDING|DependencyNeverSatisfied||N/A|never
26711170|PENDING|AssocMaxCpuPerJobLimit||N/A|a2
26711171|PENDING|Job's account not permitted to use this partition (main allows root not main)||\
2026-11-22T08:54:26|t
26711172|PENDING|Job's QOS not permitted to use this partition (main denies normal including \
normal)||N/A|t
26711160|PENDING|Resources||2026-11-22T08:53:53|res
26711161|PENDING|Priority||2026-11-22T08:53:53|prio
26711151|PENDING|ReqNodeNotAvail, UnavailableNodes:n[1-2]||2026-11-22T08:58:00|req
26711190|PENDING|ReqNodeNotAvail, May be reserved for other job||2026-11-22T09:02:01|rs2
26711186|PENDING|Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority \
partitions||N/A|d3
26711173|PENDING|PartitionDown||N/A|n
26711174|PENDING|PartitionInactive||N/A|m
26711152|PENDING|Dependency||N/A|dep
26711150|PENDING|BeginTime||2026-11-22T08:49:45|later
26711180|PENDING|Licenses||N/A|l2
26711189|PENDING|Reservation||N/A|rs1
26711182_1|PENDING|JobArrayTaskLimit||N/A|arr
26711167|PENDING|QOSMaxJobsPerUserLimit||N/A|q2
26711168|PENDING|QOSMaxCpuPerUserLimit||N/A|q3
26711170|PENDING|AssocGrpCpuLimit||N/A|a2
26711168|PENDING|AssocMaxJobsLimit||N/A|q3
26711121|PENDING|None||N/A|wrap
"""
FIRST_THAT_PASSES = "Resources"


def pending(line: str) -> Pending:
    job_id, _, reason, _, start, name = line.split("|")
    return Pending(f"{name} seed=1", job_id, reason, start)


JOBS = [pending(line) for line in SQUEUE.splitlines()]
SPLIT = [job.reason for job in JOBS].index(FIRST_THAT_PASSES)
STUCK, PASSING = JOBS[:SPLIT], JOBS[SPLIT:]


class Watched:
    """A report whose time is set by hand, and what it has said."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.said: list[str] = []
        self.report = WaitReport(self.said.append, clock=lambda: self.now)

    def update(self, *jobs: Pending, after: float = 0.0) -> list[str]:
        """What an update says that comes so many seconds after the last one."""
        self.now += after
        before = len(self.said)
        self.report.update(jobs)
        return self.said[before:]

    def seconds_of_news(self, seconds: int, *jobs: Pending) -> list[int]:
        """When something was said while the same jobs wait, asked every ten seconds."""
        return [after for after in range(0, seconds, 10) if self.update(*jobs, after=10.0)]


@pytest.fixture
def watched() -> Watched:
    return Watched()


RESOURCES = Pending("train seed=3", "1042_0", "Resources", "2026-11-22T10:00:00")
HELD = Pending("align sample=a", "1043", "JobHeldUser")


@pytest.mark.parametrize("job", STUCK, ids=lambda job: job.reason)
def test_what_never_passes_is_said_at_once_with_what_to_do(job: Pending, watched: Watched) -> None:
    (line,) = watched.update(job)

    assert line.startswith(f"waiting: 1 job, {job.reason} (")
    assert f"seed=1 ({job.job_id})" in line
    assert "; next: " in line
    assert "expects" not in line


@pytest.mark.parametrize("job", PASSING, ids=lambda job: job.reason)
def test_what_passes_is_said_in_plain_english_when_it_lasts(job: Pending, watched: Watched) -> None:
    assert watched.update(job) == []
    assert watched.update(job, after=29) == []

    (line,) = watched.update(job, after=1)

    assert line.startswith(f"waiting: 1 job, {job.reason} (")
    assert ("Slurm expects the first to start 2026-11-22T0" in line) == (job.start != "N/A")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("JobHoldMaxRequeue", "next: find the cause"),
        ("QOSMaxWallDurationPerJobLimit", "this job alone"),
        ("QOSMaxCpuMinutesPerJobLimit", "this job alone"),
        ("AssocMaxCpuPerNode", "this job alone"),
        ("QOSMinCpuNotSatisfied", "this job alone"),
        ("QOSMaxNodePerUserLimit", "starts when others end"),
        ("MaxJobsPerAccount", "starts when others end"),
        ("MaxCpuRunMinsPerUser", "starts when others end"),
        ("QOSGrpCPURunMinutesLimit", "starts when others end"),
        ("AssocGrpCPUMinutesLimit", "used up"),
        ("QOSGrpMemoryMinutes", "used up"),
        ("QOSNotAllowed", "its QOS may not be used"),
        ("AccountNotAllowed", "its account may not use"),
        ("InvalidQOS", "next: "),
        ("ReservationDeleted", "its reservation is gone"),
        ("Reservation r1 was deleted", "its reservation is gone"),
        ("ReqNodeNotAvail(Unavailable:n1)", "sinfo -R"),
        ("launch_failed_requeued_held", "scontrol release 7"),
        ("NodeDown", "sinfo -R"),
        ("Constraints", "just now"),
    ],
)
def test_reasons_of_other_versions_and_limits_are_known_too(reason: str, words: str) -> None:
    (line,) = explain([Pending("a", "7", reason)])

    assert words in line


def test_a_reason_that_nobody_knows_is_shown_as_it_is() -> None:
    assert explain([Pending("a", "7", "NvidiaImexChannels")]) == [
        "waiting: 1 job, NvidiaImexChannels: a (7)"
    ]


def test_jobs_of_one_reason_share_a_line_with_the_earliest_estimate() -> None:
    later = [
        RESOURCES._replace(job_id=f"1042_{i}", start=f"2026-11-23T0{i}:00") for i in range(1, 5)
    ]

    lines = explain([HELD, *later, RESOURCES])

    assert lines == [
        "waiting: 5 jobs, Resources (other jobs use what it needs; Slurm expects the first to start"
        " 2026-11-22T10:00): train seed=3 (1042_1), train seed=3 (1042_2), train seed=3 (1042_3),"
        " ...",
        "waiting: 1 job, JobHeldUser (held by its user): align sample=a (1043);"
        " next: scontrol release 1043",
    ]


@pytest.mark.parametrize("start", ["N/A", "", "Unknown", "tomorrow", "10:00"])
def test_an_estimate_of_another_form_is_left_out(start: str) -> None:
    (line,) = explain([RESOURCES._replace(start=start)])

    assert "expects" not in line


def test_a_jobs_own_node_names_do_not_part_a_group() -> None:
    jobs = [Pending("a", str(n), f"ReqNodeNotAvail, UnavailableNodes:n{n}") for n in range(9)]

    (line,) = explain(jobs)

    assert line.startswith("waiting: 9 jobs, ReqNodeNotAvail, UnavailableNodes:n0 (")


def test_lines_are_bounded_in_number_and_length() -> None:
    hostile = [
        Pending("wild\ncard " + "x" * 5000, f"{n}_{m}", f"Reason{n} " + "y" * 5000 + "\n{ids}")
        for n in range(50)
        for m in range(20)
    ]

    lines = explain(hostile)

    assert len(lines) == 9
    assert lines[-1] == "waiting: 840 jobs for 42 other reasons"
    assert max(map(len, lines)) < 500
    assert not any("\n" in line for line in lines)


def test_the_ids_of_many_held_jobs_are_cut() -> None:
    (line,) = explain([Pending("a", str(n), "JobHeldUser") for n in range(5000)])

    assert line.endswith("; next: scontrol release 0,1,2,3,4,5,6,7,8,9,...")


def test_nothing_is_said_about_jobs_that_come_and_go_quickly(watched: Watched) -> None:
    for number in range(100):
        jobs = [RESOURCES._replace(job_id=str(number)), RESOURCES._replace(job_id=str(number + 1))]

        assert watched.update(*jobs, after=10) == []


def test_a_requeued_jobs_wait_begins_anew(watched: Watched) -> None:
    watched.update(RESOURCES)
    watched.update(after=25)

    assert watched.update(RESOURCES, after=25) == []
    assert watched.update(RESOURCES, after=30) != []


def test_the_same_reason_is_said_once_a_minute_for_as_long_as_it_lasts(watched: Watched) -> None:
    assert watched.seconds_of_news(300, RESOURCES) == [30, 90, 150, 210, 270]


def test_what_is_new_waits_for_the_next_minute(watched: Watched) -> None:
    watched.update(HELD)
    other = HELD._replace(job_id="1044")

    assert watched.update(HELD, other, after=59) == []
    assert "2 jobs, JobHeldUser" in watched.update(HELD, other, after=1)[0]
