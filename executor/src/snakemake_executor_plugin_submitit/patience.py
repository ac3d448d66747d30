"""Patience with a controller or a database that is down, busy or restarting.

Every failure that is not known to be permanent is retried: a munge that is down, a lost message, a
full queue, a configuration being replaced, messages of future Slurm versions.
"""

import errno
import re
import time
from collections.abc import Callable
from typing import TypeVar

from snakemake_executor_plugin_submitit.slurm import SlurmError

_T = TypeVar("_T")

# Of several lines this one has Slurm's own answer; a site's plugins may say anything before it.
_ANSWER = re.compile(r"(?:Batch job submission failed|fatal): (.*)")
# Messages of Slurm 22.05 to 26.11 for a permanently invalid request, in lower case.
LASTING = (
    # Who asks, and where it may run.
    "access/permission denied",
    "burst buffer permission denied",
    "invalid user id",
    "invalid group id",
    "unable to resolve user id",
    "invalid account or account/partition",
    "invalid or unknown association",
    "invalid qos specification",
    "invalid wckey specification",
    "invalid mcs_label specified",
    "invalid partition name specified",
    "invalid partition specified",
    "no partition specified or system default partition",
    "multiple partition job request not supported",
    "not permitted to use this partition",
    "access denied to requested reservation",
    "requested reservation is invalid",
    "known by database",
    # The request. The partition's own limits, where EnforcePartLimits has them checked,
    # are "not available now" until somebody changes them; a partition or nodes that are down,
    # drained or busy refuse nothing: the job waits in the queue.
    "requested partition configuration not available now",
    "requested node configuration is not available",
    "requested topology configuration is not available",
    "requested nodes not in this partition",
    "more processors requested than permitted",
    "requested more tasks than available processors",
    "cannot request more threads per core",
    "count specification invalid",
    "distribution specification invalid",
    "job size specification needs to be provided",
    "memory required by task is not available",
    "requested time limit is invalid",
    "time limit specification required",
    "invalid time-min specification",
    "invalid time specified",
    "invalid node name specified",
    "invalid node list specified",
    "feature specification",
    "invalid extra constraints",
    "invalid license specification",
    "generic resource (gres) specification",
    "invalid gres specification",
    "requested gres option unsupported",
    "invalid trackable resource (tres) specification",
    "burst buffer request invalid",
    "job --batch option is invalid",
    "invalid job array specification",
    "job dependency problem",
    "circular job dependency",
    "container support is not configured",
    "requested operation not supported on this system",
    "parameter too long",
    "without the current working directory",
    # A job that is to be requeued or cancelled.
    "invalid job id",
    "job is pending execution",
    "already completing or completed",
    "requested operation is presently disabled",
    # sbatch's own look at its options and its script.
    "unrecognized option",
    "unrecognized --",
    "invalid option",
    "doesn't allow an argument",
    "requires an argument",
    "is ambiguous",
    "mutually exclusive",
    "invalid --",
    "invalid numeric value",
    "invalid number of",
    "invalid directive",
    "is not a valid node count",
    "only permitted by root",
    "unable to open file",
    "could not open user environment file",
    "batch script",
    # Missing programs and databases.
    "is not installed",
    "accounting storage is disabled",
)
_POLICY = "accounting/qos policy"
# The line before names the policy; without it the refusal is not known to be permanent.
_POLICY_LIMIT = re.compile(r"(?:^|: )((?:QOS|Assoc|Max)\w+)$", re.M)
_LASTING_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
    | {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}
)
_FIRST_DELAY, _LONGEST_DELAY = 2.0, 60.0


class GaveUpError(RuntimeError):
    """A permanent refusal, or no answer for longer than the patience; the message has the
    details."""

    def __init__(self, words: str, *, lasting: bool) -> None:
        super().__init__(words)
        self.lasting = lasting


def is_lasting(message: str) -> bool:
    """Whether Slurm's words say that the same request will be refused again."""
    answers = _ANSWER.findall(message)
    answer = answers[-1].lower() if answers else message.lower()
    if _POLICY in answer:
        # A limit on submitted jobs passes when jobs end. All others that are checked by sbatch
        # are about the size or the time of this one job (DenyOnLimit).
        return any("submit" not in limit.lower() for limit in _POLICY_LIMIT.findall(message))
    return any(words in answer for words in LASTING)


def _lasts(error: Exception) -> bool:
    """The system's errors are judged by their number, Slurm's by their words."""
    cause = error.__cause__ if isinstance(error, SlurmError) else error
    if isinstance(cause, OSError):
        return cause.errno in _LASTING_ERRNOS
    # Others are ours or submitit's own, such as a journal of another form: they come again.
    return not isinstance(error, SlurmError) or is_lasting(str(error))


def with_patience(
    attempt: Callable[[], _T],
    *,
    patience: float,
    on_retry: Callable[[str, float], None],
    clean_up: Callable[[], None] = lambda: None,
    passes: Callable[[str], bool] = lambda _words: False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> _T:
    """Call `attempt` until it succeeds, with growing pauses, for `patience` seconds at most.

    Before each further attempt `clean_up` runs: a call that timed out may have come through.
    `on_retry` is told the error's words and the pause in seconds. Words that `passes` is true of
    cost no patience: what they tell of will pass, whenever that is.

    Raises:
        GaveUpError: a lasting refusal, an error of ours such as a full disk, or the patience
            is over.
    """
    deadline = clock() + patience
    delay = _FIRST_DELAY
    again = False
    while True:
        try:
            if again:
                clean_up()
            return attempt()
        except (OSError, RuntimeError) as error:
            words = str(error).strip() or type(error).__name__
            is_passing = passes(words)
            if is_passing:
                deadline = max(deadline, clock() + max(patience, delay))
            left = deadline - clock()
            if _lasts(error):
                raise GaveUpError(words, lasting=True) from error
            if left <= 0 and not is_passing:
                raise GaveUpError(words, lasting=False) from error
        # The last attempt is made when the patience ends, not a pause before it.
        pause = min(delay, left)
        on_retry(words, pause)
        sleep(pause)
        delay = min(delay * 2, _LONGEST_DELAY)
        again = True
