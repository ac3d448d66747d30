"""Runs on a node: all-reduce over all members, pair exchanges, matrix products, with real gloo.

    python -m shakedown.preflight.network --request JSON

Every group has a store and a time limit of its own, so one dead pair never harms the next.
Results are sent one by one (wire.py): those of a worker that dies later still count.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shakedown.cluster.nodes import node_name
from shakedown.cluster.store import open_store
from shakedown.core.errors import LaunchError
from shakedown.preflight import wire
from shakedown.preflight.model import Member, NetworkRequest, has_fault

_CLOCK_EXCHANGES = 5


def open_group(
    leader: Member, port: int, rank: int, size: int, seconds: float
) -> tuple[dist.TCPStore, dist.ProcessGroupGloo]:
    """A gloo group whose store listens on `leader`'s address alone.

    Raises:
        LaunchError: the leader cannot listen there.
        RuntimeError: not all members arrived within `seconds`, or gloo could not connect.
    """
    limit = timedelta(seconds=seconds)
    store = open_store(leader.address, port, rank=rank, size=size, timeout=limit)
    return store, dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, limit)


def all_reduce(request: NetworkRequest, me: int) -> None:
    """Sum rank + 1 over all members and compare the members' clocks."""
    begin = time.monotonic()
    size = len(request.members)
    message: dict[str, Any] = {"kind": "all_reduce", "error": ""}
    try:
        leader = request.members[0]
        store, group = open_group(leader, leader.ports[0], me, size, request.join)
        # Sums of whole numbers are exact in float64, in whatever order gloo adds them.
        value = torch.full((1024,), float(me + 1), dtype=torch.float64)
        group.allreduce([value]).wait()
        if not bool((value == size * (size + 1) / 2).all()):
            message["error"] = f"wrong sum: {value[0].item()}, expected {size * (size + 1) / 2}"
        offsets = _clock_offsets(group, me, size, _clock_shift(request, me))
        group.barrier().wait()  # the store must outlive its last reader
        if offsets:
            message["clock"] = offsets
        del group, store
    except (RuntimeError, LaunchError) as error:
        message["error"] = _short(error)
    wire.emit({**_whose(request, me), **message, "seconds": round(time.monotonic() - begin, 3)})


def _clock_shift(request: NetworkRequest, me: int) -> float:
    injected = has_fault(request.faults, "clock_skew", request.members[me].node)
    return 120.0 if injected else 0.0


def _clock_offsets(
    group: dist.ProcessGroupGloo, me: int, size: int, shift: float
) -> dict[int, float]:
    """On rank 0: member number -> seconds ahead of rank 0, good to half a round trip (as NTP)."""
    offsets: dict[int, float] = {}
    for other in range(1, size):
        samples = []
        for _ in range(_CLOCK_EXCHANGES):
            stamp = torch.zeros(1, dtype=torch.float64)
            if me == 0:
                sent = time.time()
                group.send([stamp], other, 0).wait()
                group.recv([stamp], other, 0).wait()
                got = time.time()
                samples.append((got - sent, stamp.item() - (sent + got) / 2))
            elif me == other:
                group.recv([stamp], 0, 0).wait()
                stamp.fill_(time.time() + shift)
                group.send([stamp], 0, 0).wait()
        if samples:
            # The fastest exchange leaves the clocks the least room: half its round trip.
            offsets[other] = round(min(samples)[1], 4)
    return offsets


def exchange(request: NetworkRequest, me: int, number: int) -> None:
    """This member's pair of round `number`, if it has one: a checked sum, then timed transfers."""
    pair = next((pair for pair in request.rounds[number] if me in pair), None)
    if pair is None:
        return
    begin = time.monotonic()
    message: dict[str, Any] = {"kind": "pair", "round": number, "pair": list(pair), "error": ""}
    try:
        leader = request.members[pair[0]]
        # A port for each group: a late member of one must not reach the store of the next.
        store, group = open_group(leader, leader.ports[number + 1], pair.index(me), 2, request.pair)
        message["mb_per_s"] = round(_transfer(group, request, me), 1)
        group.barrier().wait()
        # Its sockets and threads end here, before the next round begins.
        del group, store
    except (RuntimeError, ValueError, LaunchError) as error:
        message["error"] = _short(error)
    wire.emit({**_whose(request, me), **message, "seconds": round(time.monotonic() - begin, 3)})


def _transfer(group: dist.ProcessGroupGloo, request: NetworkRequest, me: int) -> float:
    """MB/s of the fastest of `repeats` all-reduces of a two-member group.

    Raises:
        ValueError: the sum is wrong.
    """
    floats = request.megabytes * 2**18
    slow = has_fault(request.faults, "slow_node", request.members[me].node)
    best = float("inf")
    for turn in range(request.repeats):
        # Another value each turn: what a turn left behind does not pass for the next one's result.
        value = torch.full((floats,), float(turn + 1))
        begin = time.perf_counter()
        group.allreduce([value]).wait()
        taken = time.perf_counter() - begin
        best = min(best, taken * 2 if slow else taken)
        if not bool((value == 2 * (turn + 1)).all()):
            raise ValueError("the pair's sum is wrong: data is damaged on the way")
    return request.megabytes / best


def matrix_products(request: NetworkRequest, me: int) -> None:
    """Repeat one matrix product for `work` seconds on every GPU, or on the CPU.

    The slowest device counts; the same input must give the same bits each time.
    """
    gpus = torch.cuda.device_count()
    devices = [f"cuda:{number}" for number in range(gpus)] or ["cpu"]
    node = request.members[me].node
    wrong = has_fault(request.faults, "wrong_math", node)
    found = [_products(name, request.work / len(devices), wrong=wrong) for name in devices]
    slowest = min(range(len(devices)), key=lambda number: found[number][0])
    slow = has_fault(request.faults, "slow_node", node)
    facts = {
        "gflops": round(found[slowest][0] / (2 if slow else 1), 1),
        "device": devices[slowest],
        "kind": torch.cuda.get_device_name(slowest) if gpus else "cpu",
        "unstable": [name for name, (_, stable) in zip(devices, found, strict=True) if not stable],
    }
    wire.emit({**_whose(request, me), "kind": "gemm", "gemm": facts})


def _products(name: str, seconds: float, *, wrong: bool) -> tuple[float, bool]:
    """(median GFLOP/s, whether every product had the first one's bits)."""
    device = torch.device(name)
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    # Made on the CPU, so that every device of every node has the same input.
    left = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    left = left.to(device=device, dtype=dtype)
    first = left @ left
    stable = True
    rates: list[float] = []
    end = time.monotonic() + seconds
    while not rates or time.monotonic() < end:
        _wait_for(device)
        begin = time.perf_counter()
        again = left @ left
        _wait_for(device)
        # 2 n^3: a multiplication and an addition each.
        rates.append(2 * size**3 / (time.perf_counter() - begin) / 1e9)
        if wrong:
            again[0, 0] += 1
        stable = stable and torch.equal(first, again)
    return sorted(rates)[len(rates) // 2], stable


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _whose(request: NetworkRequest, me: int) -> dict[str, str]:
    return {"member": request.members[me].name}


def _short(error: Exception) -> str:
    """torch's first line; the rest is its C++ stack."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def _own_number(request: NetworkRequest) -> int | None:
    """Which member this process is; None for a node that has no part in this request."""
    node, local = node_name(), os.environ.get("SLURM_LOCALID") or os.environ.get("LOCAL_RANK", "0")
    found = [n for n, m in enumerate(request.members) if m.name in (node, f"{node}#{local}")]
    return found[0] if found else None


def main() -> None:
    """Take part in everything that the request asks of this member."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--request", required=True, help="a NetworkRequest as JSON")
    request = NetworkRequest.from_text(parser.parse_args().request)
    me = _own_number(request)
    if me is None:
        return
    member = request.members[me]
    # on one node the second member alone is dead, so that the first must notice
    if has_fault(request.faults, "gloo_dead", member.node) and not member.name.endswith("#0"):
        os._exit(1)
    if request.all_reduce:
        all_reduce(request, me)
    for number in range(len(request.rounds)):
        exchange(request, me, number)
    if request.work:
        matrix_products(request, me)
    wire.emit({**_whose(request, me), "kind": "end"})
    sys.stdout.flush()
    os._exit(0)  # gloo's threads of a failed group may still wait


if __name__ == "__main__":
    main()
