"""The thread that submits: what it gathers, and how it ends."""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from snakemake_executor_plugin_submitit.outbox import Outbox, StoppedError

LONG = 60.0


class Recipient:
    """Notes what is sent; the first sending goes on until `go` is set."""

    def __init__(self) -> None:
        self.received: list[list[str]] = []
        self.arrived = threading.Semaphore(0)
        self.go = threading.Event()

    def send(self, items: Sequence[str]) -> None:
        self.received.append(list(items))
        self.arrived.release()
        assert self.go.wait(LONG)


@pytest.fixture
def recipient() -> Recipient:
    return Recipient()


@pytest.fixture
def outbox(recipient: Recipient) -> Iterator[Outbox[str]]:
    outbox = Outbox(recipient.send)
    yield outbox
    recipient.go.set()
    assert outbox.stop(LONG)


def test_what_comes_while_one_is_sent_goes_out_together(
    outbox: Outbox[str], recipient: Recipient
) -> None:
    outbox.put(["a"])
    assert recipient.arrived.acquire(timeout=LONG)
    outbox.put(["b", "c"])
    outbox.put([])
    outbox.put(["d"])

    recipient.go.set()
    assert recipient.arrived.acquire(timeout=LONG)

    assert recipient.received == [["a"], ["b", "c", "d"]]


def test_an_idle_outbox_stops_at_once(recipient: Recipient) -> None:
    assert Outbox(recipient.send).stop(LONG)
    assert recipient.received == []


def test_after_the_stop_nothing_more_is_sent(outbox: Outbox[str], recipient: Recipient) -> None:
    outbox.put(["a"])
    assert recipient.arrived.acquire(timeout=LONG)
    outbox.put(["b"])

    in_time = outbox.stop(0.01)  # while "a" is being sent
    recipient.go.set()
    ended = outbox.stop(LONG)
    outbox.put(["c"])

    assert not in_time
    assert ended
    assert recipient.received == [["a"]]


def test_a_pause_ends_early_when_the_outbox_is_stopped() -> None:
    slept = threading.Event()
    sleeping = threading.Event()

    def send(items: Sequence[str]) -> None:
        sleeping.set()
        pausing.sleep(3600.0)
        slept.set()
        assert items

    pausing: Outbox[str] = Outbox(send)
    pausing.put(["a"])
    assert sleeping.wait(LONG)

    ended = pausing.stop(LONG)

    assert ended
    assert not slept.is_set()


def test_a_pause_passes_while_the_outbox_lives(outbox: Outbox[str]) -> None:
    began = time.monotonic()

    outbox.sleep(0.01)

    assert time.monotonic() - began >= 0.01


def test_a_pause_after_the_stop_is_none(recipient: Recipient) -> None:
    outbox = Outbox(recipient.send)
    outbox.stop(LONG)

    with pytest.raises(StoppedError):
        outbox.sleep(3600.0)
