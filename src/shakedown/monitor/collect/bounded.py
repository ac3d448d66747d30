"""Work that may never return, such as a read of a process in D state: limited in time."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")


def run_bounded(
    jobs: Sequence[Callable[[], Result]], workers: int, seconds: float
) -> list[Result | Exception | None]:
    """Run `jobs` in `workers` threads; None for each that has not ended after `seconds`.

    A call that the kernel holds cannot be ended: its thread is left behind, and because it is a
    daemon, the end of the program does not wait for it. An exception is its job's result.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(jobs)):
        todo.put(index)
    results: list[Result | Exception | None] = [None] * len(jobs)
    over = threading.Event()
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def work() -> None:
        while not over.is_set():
            try:
                index = todo.get_nowait()
            except queue.Empty:
                return
            try:
                results[index] = jobs[index]()
            except Exception as error:  # noqa: BLE001  # one job never ends the others
                results[index] = error
            ended.put(index)

    for _ in range(min(workers, len(jobs))):
        threading.Thread(target=work, name="collect", daemon=True).start()
    deadline = time.monotonic() + seconds
    for _ in jobs:
        try:
            ended.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            break
    over.set()
    # A copy: a thread that was left behind may still write its result.
    return list(results)
