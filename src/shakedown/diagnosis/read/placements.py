"""Which rank a process, a node's GPU or a line is, as NCCL, DeepSpeed and torch log it."""

import re
from collections.abc import Iterator, Mapping

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, Record, TargetName, clean, pid_of, rank_of

# `n1:51019:52019 [3] NCCL INFO ncclCommInitRank comm 0x.. rank 19 nranks 32 ... busId 5d000`
_NCCL = re.compile(
    r"([\w.-]{1,80}):(\d{1,8}):\d{1,8} \[\d{1,3}\] NCCL INFO .{0,200}?\brank (\d{1,6}) nranks "
    r"(\d{1,6}).{0,120}?\bbusId ([0-9a-f]{1,12})"
)
# DeepSpeed, behind pdsh's name of the node
_SPAWNED = re.compile(
    r"^(?:([\w.-]{1,80}): )?.{0,80}process (\d{1,8}) spawned with command: .{0,2000}"
    r"--local_rank=(\d{1,4})",
    re.M,
)
# `(Worker pid=1389) INFO ... rank 0 in world size 2 is assigned as DP rank 0, PP rank 0, ...`
_ASSIGNED = re.compile(
    r"^\(\w{1,60} pid=(\d{1,8})[^)\n]{0,60}\) .{0,120}?"
    r"rank (\d{1,6}) in world size (\d{1,6}) is assigned",
    re.M,
)
ENGINE = "inference"
_TORCHRUN = re.compile(r"(?:torchrun|torch\.distributed\.(?:run|launch)) .{1,600}")
_EACH = re.compile(r"--nproc[-_]per[-_]node[= ](\d{1,3})\b")
_NODES = re.compile(r"--nnodes[= ](\S{1,12})")
_MAPPING = re.compile(r"global_rank_mapping=.{0,60}\{(.{0,20000}?)\}\)")
_OF_NODE = re.compile(r"'([\w.-]{1,80})': \[([\d, ]{1,4000})\]")
_WORLD = re.compile(r"\b(?:dist_)?world[_ ]size\W{1,4}(\d{1,5})\b", re.I)


def parse(source: EvidenceFile) -> list[Record]:
    """Placements that the log tells."""
    return [*_of_nccl(source), *_of_deepspeed(source), *_of_vllm(source), *_world(source)]


def _world(source: EvidenceFile) -> Iterator[TargetName]:
    """Of all ranks, where a log prints one such number alone: groups have sizes of their own.

    Else what the launcher's own command says.
    """
    text = source.text
    sizes = set(map(int, _WORLD.findall(text))) if "orld" in text else set()
    sizes = sizes or (set(_launched(text)) if "nproc" in text else set())
    if len(sizes) == 1:
        yield TargetName(Identity(), "", source.place(), world=sizes.pop())


def _launched(text: str) -> Iterator[int]:
    """`torchrun --nnodes 2 --nproc-per-node=4`: 8, and 4 where no number of nodes is given."""
    for line in _TORCHRUN.findall(text)[:100]:
        each, nodes = _EACH.search(line), _NODES.search(line)
        if each and (nodes is None or nodes[1].isdecimal()):
            yield int(each[1]) * (int(nodes[1]) if nodes else 1)


def _of_nccl(source: EvidenceFile) -> Iterator[TargetName]:
    """Of the largest communicator: ranks of smaller ones count within it."""
    if "busId" not in source.text:
        return
    found = [
        (int(match[4]), number, match)
        for number, line in enumerate(source.lines, start=1)
        if "busId" in line and (match := _NCCL.search(line))
    ]
    world = max((ranks for ranks, _, _ in found), default=0)
    for ranks, number, match in found:
        rank, pid = rank_of(int(match[3])), pid_of(int(match[2]))
        if ranks == world and rank is not None and pid is not None:
            who = Identity(rank, pid, clean(match[1], 80))
            yield TargetName(who, "", source.place(number), world, bus_of(match[5]))


def bus_of(number: str) -> str:
    """`5d000`, as NCCL prints it, as the driver does: `5d:00`."""
    value = int(number, 16)
    return f"{value >> 12 & 0xFF:02x}:{value >> 4 & 0xFF:02x}"


def _of_deepspeed(source: EvidenceFile) -> Iterator[TargetName]:
    if "spawned with command" not in source.text:
        return
    ranks: Mapping[str, list[int]] = {
        node: list(map(int, numbers.split(",")))
        for mapping in _MAPPING.findall(source.text)[:1000]
        for node, numbers in _OF_NODE.findall(mapping)
    }
    for node, pid, local in _SPAWNED.findall(source.text):
        own = ranks.get(node) or (next(iter(ranks.values())) if len(ranks) == 1 else None)
        if own and int(local) < len(own) and (process := pid_of(int(pid))):
            who = Identity(rank_of(own[int(local)]), process, clean(node, 80))
            yield TargetName(who, "", source.place())


def _of_vllm(source: EvidenceFile) -> Iterator[TargetName]:
    """Ranks of an engine: those of a trainer beside it are others."""
    if "is assigned as" not in source.text:
        return
    for pid, number, world in _ASSIGNED.findall(source.text)[:10_000]:
        rank, process = rank_of(int(number)), pid_of(int(pid))
        if rank is not None and process is not None:
            who = Identity(rank, process, "", ENGINE)
            yield TargetName(who, "", source.place(), int(world))
