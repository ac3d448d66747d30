"""The placement of an allocation's ranks: node, GPU, and coordinates in the device mesh. Pure.

Inference parts come first: each replica (t x p) takes the first node that has room for it, from
GPU 0 of node 0 on. A trainer's ranks are then spread in equal parts over as many nodes as have
room, with whole tensor groups per node where possible, and on the same GPUs of each node. Parts
joined by `|` are on the same GPUs. Without GPUs (0 per node) the ranks are processes: inference on
node 0, trainers over all nodes.

Rank numbers count along the last dimension of the order first. Training is p, d, c, t (Megatron's
`tp-cp-ep-dp-pp`, read from the other end; FSDP's mesh is d, t), its experts p, d, e, t; inference
is d, p, t, as vLLM and SGLang number their workers.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shakedown.cluster.allocation import TRAINING, Allocation, AllocationPart
from shakedown.core.errors import UsageError

TRAINING_ORDER = "pdct"
EXPERT_ORDER = "pdet"
INFERENCE_ORDER = "dpt"
MAX_RANKS = 65536  # `fsdp:d999999999` must not fill the memory

Slot = tuple[int, int | None]  # (node, GPU of that node; None: a process without one)


class PlacementError(UsageError):
    """An allocation that does not fit on the nodes."""


@dataclass(frozen=True)
class RankPlace:
    """`gpu` counts from 0 on its node; `coordinates` are the rank's own, from 0."""

    rank: int
    node: int
    gpu: int | None
    coordinates: Mapping[str, int]


@dataclass(frozen=True)
class PartPlace:
    """One part on its slots. `order`: the mesh's dimensions, outermost first. `groups`: by
    dimension, the ranks that differ only in it; dimensions of size 1 are left out. `expert_groups`:
    the same for the experts' mesh.
    """

    part: AllocationPart
    order: str
    ranks: tuple[RankPlace, ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    expert_groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({place.node for place in self.ranks}))

    def gpus(self, node: int) -> tuple[int, ...]:
        """The GPUs of one node that the part uses."""
        found = {p.gpu for p in self.ranks if p.node == node and p.gpu is not None}
        return tuple(sorted(found))

    def to_json(self) -> dict[str, Any]:
        """`mesh` is [[letter, size]], outermost first; each of `ranks` has `coordinates`."""
        return {
            **self.part.to_json(),
            "mesh": [[letter, self.part.size(letter)] for letter in self.order],
            "ranks": [{**vars(p), "coordinates": dict(p.coordinates)} for p in self.ranks],
            "groups": dict(self.groups),
            "expert_groups": dict(self.expert_groups),
        }


@dataclass(frozen=True)
class Placement:
    """The parts in the order of the string. `warnings`: reasons why it fits, but not well."""

    parts: tuple[PartPlace, ...]
    warnings: tuple[str, ...] = ()


def place(allocation: Allocation, *, nodes: int, gpus_per_node: int) -> Placement:
    """Place an allocation on nodes with equally many GPUs (0: processes on CPUs).

    Raises:
        PlacementError: it does not fit; the message says what is needed and available.
    """
    _check_size(allocation, nodes, gpus_per_node)
    used = [0] * nodes
    slots: dict[int, list[Slot]] = {}
    order = sorted(range(len(allocation.groups)), key=lambda n: _trains(allocation.groups[n]))
    for number in order:  # sorted is stable: inference first, otherwise as written
        slots[number] = _group_slots(allocation.groups[number], used, gpus_per_node)
    parts, warnings = [], []
    for number, group in enumerate(allocation.groups):
        for part in group:
            warnings += _check_slots(part, slots[number], gpus_per_node)
            parts.append(_lay(part, slots[number]))
    return Placement(tuple(parts), tuple(warnings))


def place_stage(
    trainer: AllocationPart,
    server: AllocationPart | None,
    *,
    nodes: int,
    gpus_per_node: int,
    share: bool = False,
) -> Placement:
    """Place a stage's trainer and, after it in `parts`, the stage's own server if it has one.

    As `place` does for `SERVER+TRAINER`; a server stays on node 0. With `share` both begin at GPU 0
    of node 0.

    Raises:
        PlacementError: as `place`; also a server that is larger than a node.
    """
    room = {"nodes": nodes, "gpus_per_node": gpus_per_node}
    if server is None:
        return place(Allocation(((trainer,),)), **room)
    if server.world > gpus_per_node > 0:
        raise PlacementError(
            f"{server} needs {server.world} GPUs, and a server runs on one node of {gpus_per_node}"
        )
    if share:
        alone = [place(Allocation(((part,),)), **room) for part in (trainer, server)]
        return Placement(
            tuple(part for found in alone for part in found.parts),
            tuple(warning for found in alone for warning in found.warnings),
        )
    both = place(Allocation(((server,), (trainer,))), **room)
    return Placement(both.parts[::-1], both.warnings)


def _trains(group: Sequence[AllocationPart]) -> bool:
    return any(part.backend in TRAINING for part in group)


def _check_size(allocation: Allocation, nodes: int, gpus: int) -> None:
    if nodes < 1 or gpus < 0:
        raise PlacementError(f"{nodes} nodes of {gpus} GPUs: at least one node is needed")
    if gpus and allocation.gpus > nodes * gpus:
        raise PlacementError(
            f"{allocation} needs {allocation.gpus} GPUs, the cluster has {nodes} x {gpus}"
        )
    if max(allocation.gpus, nodes) > MAX_RANKS:
        raise PlacementError(
            f"{allocation} on {nodes} node(s): at most {MAX_RANKS} ranks and nodes can be placed"
        )


def _group_slots(group: Sequence[AllocationPart], used: list[int], gpus: int) -> list[Slot]:
    """The slots of a group by rank; `used` (GPUs taken, by node) is updated."""
    if not _trains(group):
        # The largest replica gets whole slots; whether the others fit into them is checked once all
        # slots are known (`_check_slots`).
        first = max(group, key=lambda part: part.size("t") * part.size("p"))
        return _inference_slots(first, used, gpus)
    tensor = max(part.size("t") for part in group)
    trainer = next(part for part in group if part.backend in TRAINING)
    return _training_slots(trainer, tensor, used, gpus)


def _inference_slots(part: AllocationPart, used: list[int], gpus: int) -> list[Slot]:
    if not gpus:
        return [(0, None)] * part.world
    replica = part.size("t") * part.size("p")
    if replica > gpus and replica % gpus:
        raise PlacementError(
            f"{part}: a replica is t*p = {replica} GPUs: more than the {gpus} of a node, "
            "and not whole nodes"
        )
    whole, each = max(1, replica // gpus), min(replica, gpus)  # nodes per replica, GPUs on each
    slots: list[Slot] = []
    node = 0
    for _ in range(part.size("d")):
        while any(taken + each > gpus for taken in used[node : node + whole]):
            node += 1
        if node + whole > len(used):
            raise _no_room(part, f"replicas of {replica} GPUs", used, gpus)
        for number in range(node, node + whole):
            slots += [(number, used[number] + gpu) for gpu in range(each)]
            used[number] += each
    return slots


def _training_slots(part: AllocationPart, tensor: int, used: list[int], gpus: int) -> list[Slot]:
    nodes = len(used)
    if not gpus:
        if part.world % nodes:
            raise PlacementError(
                f"{part}: {part.world} ranks cannot be split equally over {nodes} nodes"
            )
        return [(rank * nodes // part.world, None) for rank in range(part.world)]
    shares = [n for n in range(min(nodes, part.world), 0, -1) if part.world % n == 0]
    # Tensor parallelism communicates in every layer, which is fast only within a node: splits that
    # keep its groups whole are tried first, from most nodes to fewest.
    whole = [n for n in shares if (part.world // n) % tensor == 0]
    for count in [*whole, *shares]:
        each = part.world // count
        able = [node for node in range(nodes) if used[node] + each <= gpus][:count]
        if len(able) == count:
            # The same GPUs on each node, because srun gives all tasks one environment: one list of
            # GPUs has to be right everywhere.
            first = max(used[node] for node in able)
            for node in able:
                used[node] = first + each
            return [(node, first + gpu) for node in able for gpu in range(each)]
    raise _no_room(part, f"{part.world} GPUs in equal parts", used, gpus)


def _no_room(part: AllocationPart, what: str, used: Sequence[int], gpus: int) -> PlacementError:
    free = ", ".join(str(gpus - taken) for taken in used[:16]) + (", ..." if used[16:] else "")
    return PlacementError(f"{part} needs {what}, but the node(s) have {free} free")


def _check_slots(part: AllocationPart, slots: Sequence[Slot], gpus: int) -> list[str]:
    """Warnings about a part's slots.

    Raises:
        PlacementError: a replica spans nodes in a group that shares a trainer's GPUs.
    """
    if not gpus:
        return []
    if part.backend not in TRAINING:
        return _check_replicas(part, slots, gpus)
    tensor = part.size("t")
    spans = max(len({n for n, _ in slots[at : at + tensor]}) for at in range(0, part.world, tensor))
    if spans == 1:
        return []
    return [
        f"{part}: a tensor-parallel group of {tensor} over {spans} nodes: every layer waits for "
        f"the network; t of at most {gpus}, with whole groups per node, stays within one"
    ]


def _check_replicas(part: AllocationPart, slots: Sequence[Slot], gpus: int) -> list[str]:
    replica = part.size("t") * part.size("p")
    spans = 1
    for at in range(0, part.world, replica):
        over = {node for node, _ in slots[at : at + replica]}
        if len(over) > 1 and len(over) * gpus != replica:
            raise PlacementError(
                f"{part}: a replica of t*p = {replica} GPUs would span {len(over)} nodes"
            )
        spans = max(spans, len(over))
    if spans == 1:
        return []
    return [
        f"{part}: a replica of {replica} GPUs spans {spans} nodes; a stage's server runs on one"
    ]


def _lay(part: AllocationPart, slots: Sequence[Slot]) -> PartPlace:
    order = TRAINING_ORDER if part.backend in TRAINING else INFERENCE_ORDER
    sizes = {letter: part.size(letter) for letter in order}
    mesh = itertools.product(*(range(size) for size in sizes.values()))
    ranks = tuple(
        RankPlace(rank, node, gpu, dict(zip(order, at, strict=True)))
        for rank, ((node, gpu), at) in enumerate(zip(slots, mesh, strict=True))
    )
    experts = _expert_sizes(part)
    return PartPlace(part, order, ranks, _groups(sizes), _groups(experts) if experts else {})


def _expert_sizes(part: AllocationPart) -> dict[str, int]:
    """The experts' mesh: that of the hybrid form, or `e` split from d and c.

    Raises:
        PlacementError: `e` does not divide them.
    """
    if part.experts:
        return {letter: part.experts.get(letter, 1) for letter in EXPERT_ORDER}
    e, t, p = (part.size(letter) for letter in "etp")
    if e == 1:
        return {}
    # Experts are spread over the ranks of d and c, which would otherwise hold equal copies of them.
    if part.world % (e * t * p):
        raise PlacementError(f"{part}: e={e} does not divide d*c = {part.world // (t * p)}")
    sizes = {"p": p, "d": part.world // (e * t * p), "e": e, "t": t}
    return {letter: sizes[letter] for letter in EXPERT_ORDER}


def _groups(sizes: Mapping[str, int]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """By dimension, the ranks of a (row-major) mesh that differ only in it."""
    found, inner = {}, 1
    world = 1
    for size in sizes.values():
        world *= size
    for letter, size in reversed(list(sizes.items())):
        if size > 1:
            firsts = [rank for rank in range(world) if (rank // inner) % size == 0]
            found[letter] = tuple(
                tuple(range(first, first + size * inner, inner)) for first in firsts
            )
        inner *= size
    return {letter: found[letter] for letter in sizes if letter in found}
