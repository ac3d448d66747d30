"""sbatch's refusals: which pass, how long one waits, and when one gives up."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.journal import JournalError
from snakemake_executor_plugin_submitit.patience import (
    LASTING,
    GaveUpError,
    is_lasting,
    with_patience,
)
from snakemake_executor_plugin_submitit.slurm import SlurmError

BUSY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
WRONG = """\
sbatch: error: invalid partition specified: moon
sbatch: error: Batch job submission failed: Invalid partition name specified"""
FAILED = "sbatch: error: Batch job submission failed: "
POLICY = (
    FAILED + "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)

# What Slurm 22.05 printed.
REFUSED = f"""\
{WRONG}
--
{FAILED}Invalid account or account/partition combination specified
--
{FAILED}Invalid qos specification
--
{FAILED}Invalid feature specification
--
{FAILED}Invalid preferred feature specification
--
sbatch: error: Invalid generic resource (gres) specification
--
sbatch: error: Memory specification can not be satisfied
{FAILED}Requested node configuration is not available
--
{FAILED}More processors requested than permitted
--
{FAILED}Memory required by task is not available
--
{FAILED}Invalid node name specified
--
{FAILED}Requested nodes not in this partition
--
{FAILED}Node count specification invalid
--
{FAILED}Requested time limit is invalid (missing or exceeds some limit)
--
{FAILED}Invalid time-min specification (exceeds job's time or other limits)
--
{FAILED}Time limit specification required, but not provided
--
{FAILED}Invalid job array specification
--
{FAILED}Job dependency problem
--
{FAILED}Invalid license specification
--
{FAILED}Requested reservation is invalid
--
{FAILED}Access/permission denied
--
{FAILED}User's group not permitted to use this partition
--
{FAILED}Pathname of a file, directory or other parameter too long
--
{FAILED}Job --batch option is invalid or not a subset of --constraints
--
sbatch: unrecognized option '--moon'
Try "sbatch --help" for more information
--
sbatch: option '--requeue' doesn't allow an argument
Try "sbatch --help" for more information
--
Invalid time specification (pos=0): moon
sbatch: error: Invalid --begin specification
--
sbatch: error: Invalid --nice value, out of range (+/- 2147483645)
--
sbatch: error: invalid --profile=moon option
--
sbatch: error: unrecognized --hint argument "moon", see --hint=help
--
sbatch: error: "abc" is not a valid node count
--
sbatch: error: invalid number of nodes (-N 2-1)
--
sbatch: error: Invalid numeric value "0" for --cpus-per-task.
--
sbatch: error: Could not open user environment file /nonexist
--
sbatch: error: Unable to open file /tmp/nosuchscript
--
sbatch: error: Batch script is empty!
--
sbatch: error: No cluster 'moon' known by database.
sbatch: error: 'moon' can't be reached now, or it is an invalid entry for --cluster.  Use \
'sacctmgr list clusters' to see available clusters.
--
sbatch: error: QOSMaxWallDurationPerJobLimit
{POLICY}
--
sbatch: error: QOSMaxCpuPerJobLimit
{POLICY}
--
sbatch: error: QOSGrpCPUMinutesLimit
{POLICY}
--
Welcome to MoonCluster.
sbatch: error: Please give an account: sbatch -A
{FAILED}Invalid account or account/partition combination specified
--
scontrol: Requested operation is presently disabled for job 26711139
--
scontrol: Access/permission denied for job 26711139
--
scontrol: 26711139_7: Invalid job id specified
--
scontrol: Job is pending execution for job 26714440
--
Slurm accounting storage is disabled
"""
# In the tables of Slurm 22.05's and 26.11's libraries, and what its programs may say.
LASTING_TEXTS = """\
No partition specified or system default partition
Multiple partition job request not supported when a partition is set in the association
Invalid user id
Invalid group id
Unable to resolve user ID to user name
Invalid or unknown association
Invalid QOS specification, relative QOS can only be used in a single partition per cluster.
Invalid wckey specification
Invalid mcs_label specified
Burst Buffer permission denied
Burst Buffer request invalid
Access denied to requested reservation
Requested partition configuration not available now
Requested topology configuration is not available
Requested more tasks than available processors
Cannot request more threads per core than the job allocation
Task count specification invalid
Task distribution specification invalid
Job size specification needs to be provided
Invalid time specified
Invalid extra constraints specification
Invalid GRES specification (with and without type identification)
Requested GRES option unsupported by configured SelectType plugin
Invalid Trackable RESource (TRES) specification
Circular job dependency
Container support is not configured
Requested operation not supported on this system
Job cannot be submitted without the current working directory specified.
Job/step already completing or completed
Invalid node list specified
--mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.
--uid only permitted by root user
Invalid directive found in batch script: moon
invalid option -- 'z'
option '--gpu' is ambiguous; possibilities: '--gpus' '--gpu-bind'
option '--mem' requires an argument
"""
PASSES = f"""\
{BUSY}
--
sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying
{FAILED}Resource temporarily unavailable
--
{FAILED}Unable to contact slurm controller (connect failure)
--
sbatch: error: If munged is up, restart with --num-threads=10
sbatch: error: Munge encode failed: Failed to access "/run/munge.sock": No such file or \
directory (Did you start munged?)
sbatch: error: slurm_send_node_msg: auth_g_create: REQUEST_SUBMIT_BATCH_JOB has authentication error
{FAILED}Protocol authentication error
--
squeue: error: Munge encode failed: Failed to access "/run/munge.sock": Permission denied
slurm_load_jobs error: Protocol authentication error
--
{FAILED}I/O error writing script/environment to file
--
{FAILED}Required partition not available (inactive or drain)
--
sbatch: error: Welcome to MoonCluster.
sbatch: error: Invalid qos specification is not your problem.
{FAILED}Unspecified error
--
sbatch: error: Invalid account or account/partition: the site's default is taken
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: fatal: Could not establish a configuration source
--
sbatch: error: s_p_parse_file: unable to read "/etc/slurm/slurm.conf": Permission denied
sbatch: error: ClusterName needs to be specified
sbatch: fatal: Unable to process configuration file
--
sbatch: error: QOSMaxSubmitJobPerUserLimit
{POLICY}
--
sbatch: error: AssocMaxSubmitJobLimit
{POLICY}
--
sbatch: error: AssocGrpSubmitJobsLimit
{POLICY}
--
sbatch: error: MaxSubmitJobsPerAccount
{POLICY}
--
{POLICY}
--
squeue does not answer after 60 s
--
sacct: error: slurmdbd: Connection refused
"""
PASSING_TEXTS = """\
Message receive failure
Message send failure
Communication connection failure
Zero Bytes were transmitted or received
Invalid authentication credential
Authentication credential expired
Slurm backup controller in standby mode
Rate limit exceeded, please retry momentarily
MaxJobCount limit reached
Unable to create job record, try again
System submissions disabled
Requested reservation not usable now
Licenses currently unavailable
Requested nodes are busy
Incompatible versions of client and server code
Words that no Slurm has yet
"""


def refused_texts() -> list[str]:
    return REFUSED.split("\n--\n") + [FAILED + text for text in LASTING_TEXTS.splitlines()]


class Clock:
    """Time that passes only by sleeping; `pauses` are the sleeps in seconds."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def now(self) -> float:
        return sum(self.pauses)


def answers(*outcomes: str | list[str]) -> Callable[[], list[str]]:
    """A submission that fails with each text in turn and succeeds with a list."""
    rest: Iterator[str | list[str]] = iter(outcomes)

    def attempt() -> list[str]:
        outcome = next(rest)
        if isinstance(outcome, str):
            raise SlurmError(outcome)
        return outcome

    return attempt


def patient(attempt: Callable[[], list[str]], clock: Clock, cleaned: list[int]) -> list[str]:
    return with_patience(
        attempt,
        patience=100,
        clean_up=lambda: cleaned.append(1),
        on_retry=lambda _words, _seconds: None,
        sleep=clock.pauses.append,
        clock=clock.now,
    )


def test_a_busy_controller_is_asked_again_with_growing_pauses() -> None:
    clock, cleaned = Clock(), list[int]()

    ids = patient(answers(BUSY, BUSY, BUSY, ["7"]), clock, cleaned)

    assert ids == ["7"]
    assert clock.pauses == [2, 4, 8]
    assert len(cleaned) == 3


def test_a_lasting_refusal_is_not_repeated() -> None:
    clock = Clock()

    with pytest.raises(GaveUpError, match="moon") as caught:
        patient(answers(WRONG, ["7"]), clock, [])

    assert caught.value.lasting
    assert clock.pauses == []


def test_patience_ends() -> None:
    clock = Clock()

    with pytest.raises(GaveUpError, match="Socket timed out") as caught:
        patient(answers(*[BUSY] * 50), clock, [])

    assert not caught.value.lasting
    assert clock.now() == 100  # the last attempt is made when it ends


@pytest.mark.parametrize("words", refused_texts())
def test_what_slurm_refuses_for_good_is_lasting(words: str) -> None:
    assert is_lasting(f"sbatch: {words}")  # as `slurm.run` has it


@pytest.mark.parametrize(
    "words", PASSES.split("\n--\n") + [FAILED + text for text in PASSING_TEXTS.splitlines()]
)
def test_whatever_else_it_says_may_pass(words: str) -> None:
    assert not is_lasting(f"sbatch: {words}")


@pytest.mark.parametrize("fragment", LASTING)
def test_every_word_on_the_list_is_one_of_slurms(fragment: str) -> None:
    texts = [*refused_texts(), "sbatch is not installed or not on the PATH"]

    assert any(fragment in text.lower() for text in texts)


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory: 'sbatch'"), True),
        (OSError(errno.ENAMETOOLONG, "File name too long"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (OSError(errno.ESTALE, "Stale file handle"), False),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), False),
        (SlurmError("sbatch: "), False),
        (RuntimeError('Could not detect "srun", are you indeed on a slurm cluster?'), True),
        (JournalError("journal.jsonl has an entry of another form"), True),
    ],
    ids=str,
)
def test_errors_of_this_side_are_judged_by_their_kind(error: Exception, lasting: bool) -> None:
    clock = Clock()

    def attempt() -> list[str]:
        raise error

    with pytest.raises(GaveUpError) as caught:
        patient(attempt, clock, [])

    assert caught.value.lasting is lasting
    assert bool(clock.pauses) is not lasting


@pytest.mark.parametrize(("is_there", "words"), [(False, "not installed"), (True, "cannot run")])
def test_a_program_that_is_missing_or_cannot_be_run_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool, words: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if is_there:
        (tmp_path / "scancel").touch(mode=0o644)
    clock = Clock()

    with pytest.raises(GaveUpError, match=words) as caught:
        patient(lambda: [slurm.run(["scancel", "7"])], clock, [])

    assert caught.value.lasting
    assert clock.pauses == []


def test_what_passes_costs_no_patience() -> None:
    """Its time does not count, and what follows has the whole patience again."""
    clock = Clock()
    words = iter(["full"] * 50 + ["down"] * 500)

    def attempt() -> None:
        raise SlurmError(next(words))

    with pytest.raises(GaveUpError, match="down"):
        with_patience(
            attempt,
            patience=600,
            on_retry=lambda _words, _seconds: None,
            passes=lambda said: said == "full",
            sleep=clock.pauses.append,
            clock=clock.now,
        )

    assert clock.now() > 50 * 50 + 600
    assert next(words) == "down"
