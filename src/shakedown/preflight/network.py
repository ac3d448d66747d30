"""The worker on a node: connections, exchanges, an all-reduce and matrix products, when released.

    python -m shakedown.preflight.network --request TEXT

The launcher (network_run.py) releases one round after the other over standard input, so that
members cannot drift apart; results go to standard output (wire_format.py) one by one, so those of a
worker that dies later still count. Every exchange has a time limit that is enforced outside gloo,
whose own connect may exceed its limit.
"""

import argparse
import json
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shakedown.cluster.store import open_store
from shakedown.core.errors import LaunchError
from shakedown.preflight import wire_format
from shakedown.preflight.datatypes import WorkerRequest, has_fault
from shakedown.preflight.observed import gpu_of, node_of
from shakedown.preflight.processors import devices, measure_device
from shakedown.preflight.rounds import reach_targets
from shakedown.slurm.hostlist import node_name

CallResult = TypeVar("CallResult")

_SAMPLE = 64 * 1024  # bytes each way; more than any packet, so that a wrong MTU shows
_TRANSFER_SECONDS = 2.0
_AT_ONCE = 32  # parallel connections of one member


def within(seconds: float, function: Callable[[], CallResult]) -> CallResult:
    """Call `function` with a time limit; its result or exception is passed on.

    Raises:
        TimeoutError: it took longer; it keeps running in its thread.
    """
    ended: list[Callable[[], CallResult]] = []

    def run() -> None:
        try:
            value = function()
        except Exception as error:  # noqa: BLE001 (raised again, in the caller's thread)
            ended.append(lambda error=error: _raise(error))  # type: ignore[misc]
        else:
            ended.append(lambda: value)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not ended:
        raise TimeoutError(f"not finished within {seconds:g} s")
    return ended[0]()


def _raise(error: Exception) -> Any:
    raise error


def serve_echo(listener: socket.socket, token: str, clock: Callable[[], float]) -> None:
    """Answer every connection that knows `token` with this clock's time, then send its bytes back.

    Runs until the process ends.
    """

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(30)
            if secrets.compare_digest(_receive(connection, len(token)), token.encode()):
                connection.sendall(f"{clock():<20.6f}".encode())
                connection.sendall(_receive(connection, _SAMPLE))

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def _receive(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes.

    Raises:
        ConnectionError: the other side closed early; says how many arrived.
        TimeoutError: they did not arrive in time; says how many did.
    """
    body = bytearray()
    while len(body) < count:
        try:
            piece = connection.recv(count - len(body))
        except TimeoutError:
            raise TimeoutError(f"{len(body)} of {count} bytes arrived") from None
        if not piece:
            raise ConnectionError(f"closed after {len(body)} of {count} bytes")
        body += piece
    return bytes(body)


def reach(address: str, port: int, token: str, seconds: float) -> dict[str, Any]:
    """Connect to a member and exchange data: {ok, seconds, ahead, error}."""
    stage = "connect"
    facts: dict[str, Any] = {"ok": False, "seconds": 0.0, "ahead": None, "error": ""}
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            stage = "connected, but it did not answer"
            sent = time.time()
            connection.sendall(token.encode())
            now = float(_receive(connection, 20))
            got = time.time()
            facts["seconds"] = round(got - sent, 5)
            facts["ahead"] = round(
                now - (sent + got) / 2, 4
            )  # as in NTP: accurate to half a round trip
            stage = "it answered, but large packets are lost (MTU?)"
            connection.sendall(bytes(_SAMPLE))
            _receive(connection, _SAMPLE)
            facts["ok"] = True
    except TimeoutError as error:
        facts["error"] = f"{stage}: timed out after {seconds:g} s ({error})"
    except (OSError, ValueError) as error:
        facts["error"] = f"{stage}: {getattr(error, 'strerror', None) or error}"
    return facts


class NetworkWorker:
    """One member: its listeners, and its part in each round."""

    def __init__(self, request: WorkerRequest, name: str) -> None:
        """Listen; the first message names the ports.

        Raises:
            LaunchError: this node cannot listen on the address that the others use for it.
        """
        self._request = request
        self._name = name
        self._node = node_of(name)
        address = request.addresses[self._node] if "#" not in name else "127.0.0.1"
        limit = timedelta(seconds=request.limit)
        # One store for all rounds: each group's names have their own prefix.
        self._store = open_store(address, 0, rank=0, size=None, timeout=limit)
        family = socket.AF_INET6 if ":" in self._store.host else socket.AF_INET
        listener = socket.create_server((self._store.host, 0), family=family)
        shift = 120.0 if self._has("clock_skew") else 0.0
        threading.Thread(
            target=serve_echo,
            args=(listener, request.token, lambda: time.time() + shift),
            daemon=True,
        ).start()
        self._members: dict[str, Sequence[Any]] = {}
        self._backend = "gloo"
        ports = {"echo": listener.getsockname()[1], "store": self._store.port}
        self._emit("listening", address=address, gpus=torch.cuda.device_count(), **ports)

    def _has(self, fault: str) -> bool:
        return has_fault(self._request.faults, fault, self._node)

    def _emit(self, kind: str, **facts: Any) -> None:
        wire_format.emit({"kind": kind, "member": self._name, **facts})

    def obey(self, order: Mapping[str, Any]) -> None:
        """Take part in the round that one line of the launcher requests."""
        if "members" in order:
            self._members = dict(order["members"])
            self._backend = order["backend"]
            return
        begin = time.monotonic()
        for action in ("reach", "pairs", "all_reduce", "work", "present"):
            if action in order:
                facts = getattr(self, f"_{action}")(order)
                if facts is not None:
                    seconds = round(time.monotonic() - begin, 3)
                    self._emit(action, round=order["round"], took=seconds, **facts)

    def _reach(self, order: Mapping[str, Any]) -> dict[str, Any] | None:
        names = list(self._members)
        numbers = reach_targets(len(names))[names.index(self._name)]
        # Given targets are those of a second try.
        targets = (order["reach"] or {self._name: [names[n] for n in numbers]}).get(self._name)
        if not targets:
            return None
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = pool.map(self._reach_one, targets)
            return {"to": dict(zip(targets, found, strict=True))}

    def _reach_one(self, name: str) -> dict[str, Any]:
        address, echo, _ = self._members[name]
        return reach(address, echo, self._request.token, self._request.limit)

    def _group(self, order: Mapping[str, Any], names: Sequence[str]) -> Any:
        """A process group of these members, using the store of the first.

        Raises:
            RuntimeError: not all arrived in time, or a connection failed.
        """
        limit = timedelta(seconds=self._request.limit)
        address, _, port = self._members[names[0]]
        own = names[0] == self._name
        store = self._store if own else open_store(address, port, rank=1, size=None, timeout=limit)
        prefixed = dist.PrefixStore(f"{order['round']}/{names[0]}", store)
        rank, size = names.index(self._name), len(names)
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(prefixed, rank, size, options)
        return dist.ProcessGroupGloo(prefixed, rank, size, limit)

    def _tensor(self, count: int, value: float, dtype: torch.dtype) -> torch.Tensor:
        device = f"cuda:{gpu_of(self._name)}" if self._backend == "nccl" else "cpu"
        return torch.full((count,), value, dtype=dtype, device=device)

    def _bounded(self, function: Callable[[], dict[str, Any]], slack: float) -> dict[str, Any]:
        """The facts, or {error}."""
        try:
            return within(self._request.limit + slack, function)
        except (RuntimeError, ValueError, TimeoutError, LaunchError) as error:
            return {"error": _short(error)}

    def _all_reduce(self, order: Mapping[str, Any]) -> dict[str, Any] | None:
        names = order["all_reduce"]
        if self._name not in names:
            return None

        def reduce() -> dict[str, Any]:
            group = self._group(order, names)
            # Sums of whole numbers are exact in float64, in any order.
            value = self._tensor(1024, float(names.index(self._name) + 1), torch.float64)
            group.allreduce([value]).wait()
            right = len(names) * (len(names) + 1) / 2
            if not bool((value == right).all()):
                return {"error": f"wrong sum: {value[0].item()}, expected {right}"}
            group.barrier().wait()  # the connections must outlive their last reader
            return {"error": ""}

        return self._bounded(reduce, order["slack"])

    def _pairs(self, order: Mapping[str, Any]) -> dict[str, Any] | None:
        pair = next((pair for pair in order["pairs"] if self._name in pair), None)
        if pair is None:
            return None

        def exchange() -> dict[str, Any]:
            group = self._group(order, pair)
            speeds = self._transfer(group, order["megabytes"], order["repeats"])
            group.barrier().wait()
            return {"error": "", "mb_per_s": speeds}

        return {"pair": pair, **self._bounded(exchange, order["slack"])}

    def _transfer(self, group: Any, megabytes: int, repeats: int) -> list[float]:
        """MB/s of each all-reduce of a two-member group; a slow link runs fewer.

        Raises:
            ValueError: the sum is wrong.
        """
        speeds: list[float] = []
        end = time.monotonic() + _TRANSFER_SECONDS
        while len(speeds) < repeats and self._both(group, time.monotonic() < end or not speeds):
            # A different value each turn, so that an old result is not taken for a new one.
            turn = len(speeds) + 1
            value = self._tensor(megabytes * 2**18, float(turn), torch.float32)
            begin = time.perf_counter()
            group.allreduce([value]).wait()
            right = bool((value == 2 * turn).all())  # on a GPU this waits for the transfer
            taken = time.perf_counter() - begin
            if not right:
                raise ValueError("the pair's sum is wrong: data is damaged in transit")
            speeds.append(round(megabytes / taken / (2 if self._has("slow_node") else 1), 1))
        return speeds

    def _both(self, group: Any, willing: bool) -> bool:
        """Whether both members agree."""
        votes = self._tensor(1, float(willing), torch.float32)
        group.allreduce([votes]).wait()
        return bool(votes.item() == 2)

    def _present(self, _order: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def _work(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """{device: result of `measure_device`}, one device after the other."""
        names = devices()
        found = {}
        for name in names:
            facts = measure_device(name, order["work"] / len(names))
            if self._has("slow_node"):
                facts["gflops"] = [rate / 2 for rate in facts["gflops"]]
            found[name] = facts | ({"stable": False} if self._has("wrong_math") else {})
        return {"devices": found}


def _short(error: Exception) -> str:
    """torch's first line; the rest is its C++ stack."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def read_orders(orders: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    """Put the launcher's lines into the queue, and None at the end."""
    for line in sys.stdin:
        if line.strip():
            orders.put(json.loads(line))
    orders.put(None)


def main() -> None:
    """Take part in every round until the launcher closes its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--request", required=True, help="a WorkerRequest as text")
    request = WorkerRequest.from_text(parser.parse_args().request)
    local = os.environ.get("SLURM_LOCALID") or os.environ.get("LOCAL_RANK", "0")
    name = node_name() if len(request.addresses) > 1 else f"{node_name()}#{local}"
    # On one node only the second member is dead, so that the first must notice.
    if has_fault(request.faults, "gloo_dead", node_name()) and not name.endswith("#0"):
        os._exit(1)
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=read_orders, args=(orders,), daemon=True).start()
    try:
        worker = NetworkWorker(request, name)
    except (LaunchError, OSError, RuntimeError) as error:
        wire_format.emit({"kind": "failed", "member": name, "error": _short(error)})
        sys.exit(1)
    while (order := orders.get()) is not None:
        # A worker that was stopped for a while finds several: the launcher has moved on, and only
        # in the newest round partners wait for it.
        if "members" in order or orders.empty():
            worker.obey(order)
    sys.stdout.flush()
    os._exit(0)  # abandoned threads may still be waiting


if __name__ == "__main__":
    main()
