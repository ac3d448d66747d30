"""Who may write a folder: one process at a time, and the next one only once it is gone.

`.lease/N` in the folder is the N-th holder's; it is made with a hard link, which one process alone
gets, on NFS too, and becomes `.lease/N.released` at its end. Nothing is ever written over or
removed under a name that somebody else could have by then, so no two can take the same number over.
N grows with each holder: a writer whose number is not the newest must stop (`Fence`).

A holder is gone only when that is proven: on its own machine no process has its number and start
time; its machine was rebooted; or Slurm says that its job has ended. Silence proves nothing (a
stopped process, a cut network): a person who knows better says so with the command in the message.
"""

import contextlib
import errno
import json
import os
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from shakedown.core.errors import RefusedError, UsageError
from shakedown.core.files import read_json_as
from shakedown.core.folders import storage_errors
from shakedown.core.leftovers import temporary_file
from shakedown.core.private import own_folder, write_secret
from shakedown.processes.identity import boot_id, pid_space, started

RENEW_SECONDS = 30.0  # a file server may be away for a moment: a sign of life, not a proof
_SILENCE_SECONDS = (
    4 * RENEW_SECONDS
)  # how long a waiter goes without a sign of life from the holder
_POLL_SECONDS = 0.25
_FOLDER = ".lease"
_RELEASED = ".released"
_ENDINGS = ("", _RELEASED)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_TRIES = 100  # a number is lost only when another process has taken it


@dataclass(frozen=True)
class Holder:
    """A process that writes a folder: `what` it does, since when, and the facts that can prove it
    gone.

    `job`, `restarts` and `cluster`: its Slurm job, which keeps its number when it is requeued.
    """

    what: str
    host: str
    pid: int
    started: int
    boot: str
    space: int
    since: str
    job: str = ""
    restarts: int = 0
    cluster: str = ""

    def __post_init__(self) -> None:
        # A signal to a number below 1 goes to a process group, to -1 to all of this user's
        # processes.
        if self.pid < 1:
            raise ValueError(f"no process has the id {self.pid}")

    @classmethod
    def here(cls, what: str) -> Self:
        """This process."""
        pid, environment = os.getpid(), os.environ
        count = environment.get("SLURM_RESTART_COUNT", "")
        return cls(
            what,
            os.uname().nodename,
            pid,
            started(pid),
            boot_id(),
            pid_space(),
            f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            _job(environment),
            int(count) if count.isdecimal() else 0,
            environment.get("SLURM_CLUSTER_NAME", ""),
        )

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"{self.what} (pid {self.pid} on {self.host}{job}), since {self.since}"

    def within_reach(self, here: "Holder") -> bool:
        """Whether its process can be inspected from here."""
        return (self.boot, self.space) == (here.boot, here.space)

    def is_gone(self, here: "Holder", job_ended: "JobEnded") -> bool:
        """Whether it provably writes no more."""
        if self.within_reach(here):
            return started(self.pid) != self.started
        if self.host == here.host and self.boot != here.boot:
            return True
        if not self.job:
            return False
        # Slurm restarts a job only after ending the previous run.
        if (self.job, self.cluster) == (here.job, here.cluster):
            return self.restarts < here.restarts
        return job_ended(self.job, self.cluster)


JobEnded = Callable[
    [str, str], bool
]  # (Slurm job, cluster) -> whether Slurm says that it has ended


def _job(environment: Mapping[str, str]) -> str:
    """This process's job id as Slurm lists it; empty for a heterogeneous job."""
    if "SLURM_HET_SIZE" in environment:
        return ""
    array, task = (environment.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


def _not_known(_job: str, _cluster: str) -> bool:
    return False


@dataclass(frozen=True)
class Fence:
    """The lease number under which a folder is written; 0: without a lease."""

    folder: Path
    number: int = 0

    def check(self) -> None:
        """Refuse to continue if another process has taken the folder since.

        Raises:
            RefusedError: the folder now belongs to another process.
        """
        newest = max(_numbers(self.folder / _FOLDER), default=self.number)
        if self.number and newest != self.number:
            raise RefusedError(
                f"{self.folder} has been taken over by another process (its lease is number "
                f"{newest}, this one's was {self.number}): nothing more is written here"
            )


@contextlib.contextmanager
def hold(
    folder: Path, what: str, *, job_ended: JobEnded = _not_known, wait: bool = False
) -> Iterator[Fence]:
    """Hold the folder as its only writer; it is created if missing.

    Args:
        what: what the holder does, for the message to a second process.
        wait: wait for a holder that shows signs of life, and then hold.

    Raises:
        RefusedError: another process holds it, or cannot be proven to be gone.
        StorageError: the folder cannot be written.
        UntrustedError: others could have written the lease.
    """
    folder = folder.absolute()
    place = folder / _FOLDER
    with storage_errors("write", place):
        own_folder(place)
        number = _take(place, Holder.here(what), job_ended, wait=wait)
    mine = place / str(number)
    done = threading.Event()
    renewal = threading.Thread(target=_renew, args=(mine, done), name="lease", daemon=True)
    renewal.start()
    try:
        yield Fence(folder, number)
    finally:
        done.set()
        renewal.join()
        # A rename needs no space on a full disk. If the lease stays, it is that of a process that
        # ends.
        with contextlib.suppress(OSError):
            mine.rename(f"{mine}{_RELEASED}")


def holder_of(folder: Path, *, job_ended: JobEnded = _not_known) -> Holder | None:
    """The folder's holder; None if nobody holds it, or the last holder is proven to be gone.

    Raises:
        RefusedError: the lease does not say who.
        UntrustedError: others could have written it.
    """
    place = folder / _FOLDER
    newest = max(_numbers(place), default=0)
    return _living(place / str(newest), Holder.here(""), job_ended)


def _take(place: Path, holder: Holder, job_ended: JobEnded, *, wait: bool) -> int:
    """Take the lease and return its number."""
    for _ in range(_TRIES):
        newest = max(_numbers(place), default=0)
        last = place / str(newest)
        while other := _living(last, holder, job_ended):
            if not wait or _silence(last) > _SILENCE_SECONDS:
                raise _refusal(last, other, holder)
            time.sleep(_POLL_SECONDS)
        mine = place / str(newest + 1)
        if not _create(mine, holder):
            continue
        # A process that looked long ago may have made a number that others have had by now.
        if _is_newest(place, newest + 1):
            _tidy(place, newest)
            return newest + 1
        mine.unlink(missing_ok=True)
    raise RefusedError(f"{place.parent} is being taken by one process after another: try again")


def _living(last: Path, here: Holder, job_ended: JobEnded) -> Holder | None:
    """The newest lease's holder, unless it has released the folder or is proven to be gone."""
    try:
        holder = read_json_as(Holder, last, "lease", unknown="ignore")
    except UsageError as error:
        if not last.exists():  # released, or there never was one
            return None
        raise RefusedError(
            f"{last.parent.parent} is in use: {error.args[0]}", hint=_clear(last)
        ) from error
    return None if holder.is_gone(here, job_ended) else holder


def _refusal(last: Path, holder: Holder, here: Holder) -> RefusedError:
    if holder.within_reach(here):
        return RefusedError(
            f"{last.parent.parent} is in use: {holder}",
            hint=f"wait for it, or end it: kill {holder.pid}",
        )
    return RefusedError(
        f"{last.parent.parent} is in use: {holder}; its last sign of life is {_silence(last):.0f} "
        f"s old (expected every {RENEW_SECONDS:.0f} s), but it is not proven to be gone",
        hint=f"wait for it or, if you know that it is gone: {_clear(last)}",
    )


def _clear(last: Path) -> str:
    return shlex.join(["mv", str(last), f"{last}{_RELEASED}"])


def _silence(last: Path) -> float:
    """Seconds by the file server's clock, which may not be this machine's."""
    try:
        with tempfile.TemporaryFile(dir=last.parent) as now:
            return max(0.0, os.fstat(now.fileno()).st_mtime - last.stat().st_mtime)
    except OSError:
        return 0.0


def _numbers(place: Path) -> list[int]:
    """The numbers of all holders whose files are there."""
    try:
        names = os.listdir(place)
    except FileNotFoundError:
        return []
    found = (name.removesuffix(_RELEASED) for name in names)
    return [int(name) for name in found if name.isascii() and name.isdecimal() and len(name) < 16]


def _is_newest(place: Path, number: int) -> bool:
    numbers = _numbers(place)
    return max(numbers) == number and numbers.count(number) == 1


def _create(mine: Path, holder: Holder) -> bool:
    """Create the lease atomically, if nobody has its number."""
    text = json.dumps(asdict(holder)).encode()
    handle, draft = temporary_file(mine)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text)
        os.link(draft, mine)
    except FileExistsError:
        # A file server that gets a request twice refuses what it has already done.
        return Path(draft).stat().st_nlink > 1
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_plainly(mine, text)
    finally:
        os.unlink(draft)
    return True


def _create_plainly(mine: Path, text: bytes) -> bool:
    """For file systems without hard links; a reader in between finds no holder in it, and is
    refused."""
    try:
        write_secret(mine, text)
    except FileExistsError:
        return False
    return True


def _tidy(place: Path, newest: int) -> None:
    """The previous holder's file stays, for people to read; a latecomer must find its number
    taken."""
    for number in _numbers(place):
        for ending in _ENDINGS if number < newest else ():
            (place / f"{number}{ending}").unlink(missing_ok=True)


def _renew(mine: Path, done: threading.Event) -> None:
    while not done.wait(RENEW_SECONDS):
        with contextlib.suppress(OSError):  # the file server is away: the work matters more
            os.utime(mine)
