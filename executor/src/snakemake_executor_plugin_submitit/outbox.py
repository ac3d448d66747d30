"""A submitting thread, so that Snakemake continues while Slurm does not answer."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")


class StoppedError(Exception):
    """The run is being cancelled: nothing more is submitted."""


class Outbox(Generic[_T]):
    """Passes queued items to `send`, all that have gathered at once, in its own thread.

    `send` deals with every item and raises nothing but StoppedError.
    """

    def __init__(self, send: Callable[[Sequence[_T]], None]) -> None:
        self._send = send
        self._items: queue.SimpleQueue[_T | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="submitit-outbox", daemon=True)
        self._thread.start()

    def put(self, items: Sequence[_T]) -> None:
        for item in items:
            self._items.put(item)

    def sleep(self, seconds: float) -> None:
        """A pause of `send` that ends early when the outbox is stopped.

        Raises:
            StoppedError: it is.
        """
        if self._stopped.wait(seconds):
            raise StoppedError

    def stop(self, patience: float) -> bool:
        """Submit nothing more; False when the call to Slurm under way outlasts `patience`."""
        self._stopped.set()
        # Wakes the thread where it waits for an item.
        self._items.put(None)
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not self._stopped.is_set():
            items = self._gather()
            if not items or self._stopped.is_set():
                return
            try:
                self._send(items)
            except StoppedError:
                return

    def _gather(self) -> list[_T]:
        """Wait for one item and take all that came with it; none at the end."""
        items: list[_T] = []
        item = self._items.get()
        while item is not None:
            items.append(item)
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                break
        return items
