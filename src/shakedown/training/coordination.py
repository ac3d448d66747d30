"""Coordination of the ranks: sums by one collective, decisions of rank 0 without any.

A decision that can take long (a rollout batch, an evaluation) must not be awaited inside a
collective: the rank could not beat, and a hang diagnosis could not tell waiting from hanging. So
rank 0 writes its decision into the process group's store, which notifies the others: none polls,
so a thousand waiting ranks cost rank 0 nothing.

torch's store has no authentication: any process that reaches its port can write into it. So the
ranks sign their messages there.
"""

import functools
import hashlib
import hmac
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from shakedown.core.errors import CannotJudgeError, ShakedownError

_POLL_SECONDS = 0.02  # of rank 0's own store
_BEAT_SECONDS = 0.5
# Prefix of the reason that rank 0 writes instead of a decision that it could not make.
_FAILED = "failed:"
_FAILURES = "_failures"  # a name in the ranks' sum: how many of them failed
# Rank 0 holds the store: were it gone before the others looked, they would see a broken connection.
_HEARD_SECONDS = 5.0
_SIGNATURE_BYTES = hashlib.sha256().digest_size


class PeerFailedError(CannotJudgeError):
    """Another rank failed, and this one was told; it has no error of its own."""


class Ranks:
    """This rank among all.

    Args:
        store: shared by the ranks of one process group.
        key: known to these ranks alone, and to no other group of them; what was signed with it
            there would be taken here (training/stage/job.py).
    """

    def __init__(self, store: dist.Store, *, device: torch.device, key: bytes) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # torch keeps keys of its own in this store: a prefix keeps ours apart.
        self._store = dist.PrefixStore("shakedown", store)
        self._device = device
        self._key = key
        self._decisions = 0

    @contextmanager
    def failing_last(self, part: str) -> Iterator[None]:
        """Let rank 0, which holds the store, fail in `part` only after the others are through it.

        What is wrong with a shared input is wrong on every rank: one that comes a moment later
        would meet a broken connection, and tell of that instead. No rank is waited for for long:
        it may stand in a collective with the one that failed.
        """
        try:
            yield
        except Exception:
            with suppress(dist.DistError):  # rank 0 did not wait: what failed here is to be told
                self._store.add(f"{part}-heard", 1)
            if self.rank == 0:
                self._wait_until_heard(part, by=self.world_size)
            raise
        self._store.add(f"{part}-heard", 1)

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """(collective) Add up numbers by name; the names must be the same on all ranks."""
        # Sorted: the all-reduce adds by place, and ranks may have noted the names in another order.
        names = sorted(values)
        # float64: float32 counts tokens exactly only up to 2**24.
        numbers = torch.tensor([values[name] for name in names], dtype=torch.float64)
        numbers = numbers.to(self._device)
        dist.all_reduce(numbers)
        return dict(zip(names, numbers.tolist(), strict=True))

    def all_reduce_or_raise(
        self, values: Mapping[str, float], failure: ShakedownError | None
    ) -> dict[str, float]:
        """(collective) `sum`, in which a rank that has failed still takes part, to say so.

        Without it the others would stand in their next collective and see a torn connection.

        Args:
            failure: what this rank met since the last collective; None: nothing.

        Raises:
            PeerFailedError: another rank failed; on that rank `failure` itself is raised.
            CannotJudgeError: what it said is not signed.
        """
        self._decisions += 1
        key = f"{self._decisions}-failure"
        if failure is not None:  # the text is there before anyone knows that there is one
            self._write(key, f"rank {self.rank} failed: {type(failure).__name__}: {failure}")
        sums = self.sum({**values, _FAILURES: float(failure is not None)})
        failed = int(sums.pop(_FAILURES))
        if not failed:
            return sums
        text = self._read(key)
        if failure is None:
            self._store.add(f"{key}-heard", 1)
        # Ranks that failed raise their own error and need no text: they are not waited for.
        if self.rank == 0:
            self._wait_until_heard(key, by=self.world_size - failed)
        raise PeerFailedError(text) if failure is None else failure

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """(collective) The largest over all ranks, element by element, on the CPU.

        Ranks that each know some elements tell each other: the others are -inf.
        """
        shared = values.to(self._device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.cpu()

    def broadcast_from_rank0(
        self, key: str, decide: Callable[[], str], *, waiting: Callable[[], None]
    ) -> str:
        """Rank 0 decides; every rank returns its decision. All ranks call it in the same order.

        Args:
            key: names the decision, for people; the same on all ranks.
            decide: called on rank 0 alone.
            waiting: called twice a second on the other ranks.

        Raises:
            PeerFailedError: rank 0 failed; there the error itself is raised.
            CannotJudgeError: rank 0 is gone, or the decision is not signed.
        """
        # Numbered, as a name may come again in a later step and a key of the store stays for good.
        # Ranks that make the same calls in the same order count alike.
        self._decisions += 1
        key = f"{self._decisions}-{key}"
        if self.rank == 0:
            return self._decide(key, decide)
        try:
            return self._follow(key, waiting)
        except dist.DistNetworkError as error:
            why = f"rank 0, which coordinates the run, has exited (waiting for {key})"
            raise CannotJudgeError(why) from error

    def _follow(self, key: str, waiting: Callable[[], None]) -> str:
        arrival = self._arrival(key)
        while True:
            try:
                fault = arrival.get(timeout=_BEAT_SECONDS)
                break
            except queue.Empty:
                waiting()
        if fault is not None:
            raise fault
        decision = self._read(key)
        if decision.startswith(_FAILED):
            self._store.add(f"{key}-heard", 1)
            raise PeerFailedError(f"rank 0 failed: {decision.removeprefix(_FAILED)}")
        return decision

    def _arrival(self, key: str) -> "queue.SimpleQueue[Exception | None]":
        """Gets None once the key is there, or why it cannot come."""
        told: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def wait() -> None:
            while True:
                try:
                    self._silent.wait([key])
                except dist.DistStoreError:  # the store's own limit, of half an hour at least
                    continue
                except Exception as error:  # noqa: BLE001 - raised in the thread that waits for it
                    return told.put(error)
                return told.put(None)

        threading.Thread(target=wait, name="rank 0's decision", daemon=True).start()
        return told

    @functools.cached_property
    def _silent(self) -> dist.Store:
        """A connection of its own: a wait holds the one that it is made by."""
        return self._store.clone()

    def _decide(self, key: str, decide: Callable[[], str]) -> str:
        try:
            decision = decide()
        # Also for KeyboardInterrupt and SystemExit: the others would poll for ever.
        except BaseException as error:
            self._write(key, f"{_FAILED}{type(error).__name__}: {error}")
            self._wait_until_heard(key, by=self.world_size - 1)
            raise
        self._write(key, decision)
        return decision

    def _write(self, name: str, text: str) -> None:
        self._store.set(name, self._signature(name, text.encode()) + text.encode())

    def _read(self, name: str) -> str:
        found: bytes = self._store.get(name)
        signature, text = found[:_SIGNATURE_BYTES], found[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(name, text)):
            raise CannotJudgeError(
                f"{name} in the ranks' store is not signed with this attempt's key: "
                "a process outside the job wrote it",
                hint="see who else uses the nodes, and run the stage where nobody else does "
                "(sbatch --exclusive)",
            )
        return text.decode()

    def _signature(self, name: str, text: bytes) -> bytes:
        """The signature of a text under one name; it is invalid under any other."""
        return hmac.digest(self._key, name.encode() + b"\0" + text, hashlib.sha256)

    def _wait_until_heard(self, key: str, *, by: int) -> None:
        """Let the others read who failed; one that hangs elsewhere is not waited for."""
        began = time.monotonic()
        while self._store.add(f"{key}-heard", 0) < by:  # adding 0 reads the count
            if time.monotonic() - began > _HEARD_SECONDS:
                return
            time.sleep(_POLL_SECONDS)
