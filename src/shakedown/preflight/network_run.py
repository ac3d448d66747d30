"""Start the network workers, put their messages together, re-pair the suspects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from shakedown.cluster.ranks import loopback_of
from shakedown.preflight.judge_network import culprits, suspects
from shakedown.preflight.launch import Launcher, Message
from shakedown.preflight.model import (
    Facts,
    Member,
    NetworkReport,
    NetworkRequest,
    NodeReport,
    PairResult,
    Tier,
)
from shakedown.preflight.rounds import Pair, repair_pairs, two_rounds
from shakedown.preflight.settings import Settings

_IMPORT_SECONDS = 120.0  # torch from a cold shared file system
_SLOWEST_MB_PER_S = 50.0  # the link speed below which a transfer runs out of time
_WAVES = 3


@dataclass(frozen=True)
class _Load:
    """What a tier moves and computes: one exchange of 1 MB shows that a pair works."""

    megabytes: int
    repeats: int
    work: float


def _load(tier: Tier, burn: float) -> _Load:
    loads = {
        "quick": _Load(1, 1, 0.0),
        "standard": _Load(64, 5, 3.0),
        "burn": _Load(256, max(1, round(burn / 10)), burn),
    }
    return loads[tier]


def check_network(
    launcher: Launcher,
    settings: Settings,
    addresses: Mapping[str, str],
    reports: Mapping[str, NodeReport],
) -> NetworkReport:
    """All-reduce and two pair rounds over the nodes that answered, then waves of re-pairing."""
    if find_spec("torch") is None:  # the workers are started with this Python
        why = "torch is not installed: pip install 'slurm-shakedown[train]'"
        return NetworkReport(excluded=dict.fromkeys(reports, why))
    members, excluded = choose_members(addresses, reports)
    if not members:
        return NetworkReport(excluded=excluded)
    load = _load(settings.want.tier, settings.burn)
    request = NetworkRequest(
        members=members,
        rounds=two_rounds(len(members)),
        # What a worker that never joins costs: `join` once, and `pair` in each of its rounds.
        join=max(20.0, settings.limit),
        pair=min(max(10.0, settings.limit / 2), 20.0),
        work=load.work,
        megabytes=load.megabytes,
        repeats=load.repeats,
        faults=settings.faults,
    )
    report = replace(_run(launcher, request), excluded=excluded)
    for _ in range(_WAVES):
        pairs = next_wave(members, report.pairs)
        if not pairs:
            break
        settings.say(f"re-pairing {len(pairs)} suspect(s)")
        again = replace(request, rounds=[pairs], all_reduce=False, work=0.0)
        wave = _run(launcher, again, first_round=max(p.round for p in report.pairs) + 1)
        report = replace(report, pairs=[*report.pairs, *wave.pairs])
    return report


def choose_members(
    addresses: Mapping[str, str], reports: Mapping[str, NodeReport]
) -> tuple[list[Member], dict[str, str]]:
    """(members, node -> why it has no part). A single node gets two members."""
    free: dict[str, Sequence[int]] = {}
    excluded: dict[str, str] = {}
    for node, report in reports.items():
        row = report.checks.get("ports")
        ports = row.facts.get("free", ()) if row else ()
        # Four for each of two members of a single node: the all-reduce's, two rounds' and a spare.
        if len(ports) >= 8:
            free[node] = ports
        else:
            excluded[node] = "no free ports to listen on"
    if len(free) == 1:
        node, ports = next(iter(free.items()))
        two = [Member(f"{node}#{n}", "127.0.0.1", ports[4 * n : 4 * n + 4]) for n in range(2)]
        return two, excluded
    return [Member(node, addresses[node], ports[:4]) for node, ports in free.items()], excluded


def next_wave(members: Sequence[Member], pairs: Sequence[PairResult]) -> list[Pair]:
    """Pairs of one undecided suspect and one good member each; none when all is decided."""
    number = {member.name: index for index, member in enumerate(members)}
    counted = suspects(pairs)
    known = culprits(pairs)
    undecided = sorted((n for n in counted if n not in known), key=lambda n: (counted[n], n))
    good = [index for name, index in number.items() if name not in counted]
    tried = {tuple(sorted((number[p.a], number[p.b]))) for p in pairs}
    return repair_pairs([number[name] for name in undecided], good, tried)  # type: ignore[arg-type]


def _run(launcher: Launcher, request: NetworkRequest, first_round: int = 1) -> NetworkReport:
    """Start a worker for each member that takes part."""
    active = sorted({n for pairs in request.rounds for pair in pairs for n in pair})
    members = [request.members[n] for n in active]
    nodes = list(dict.fromkeys(member.node for member in members))
    transfer = request.pair + request.megabytes * request.repeats / _SLOWEST_MB_PER_S
    busy = request.join + len(request.rounds) * transfer + request.work + 10.0
    answers = launcher.ask(
        "shakedown.preflight.network",
        ["--request", request.to_text()],
        [nodes],
        tasks=len(members) // len(nodes),
        env={"OMP_NUM_THREADS": "1", **loopback_of(nodes)},
        seconds=_IMPORT_SECONDS + busy,
        enough=lambda messages: sum(m.get("kind") == "end" for m in messages) >= len(members),
    )
    return assemble(request, members, answers.messages, answers.tails, first_round)


def assemble(
    request: NetworkRequest,
    members: Sequence[Member],
    messages: Sequence[Message],
    tails: Mapping[str, str],
    first_round: int,
) -> NetworkReport:
    """Put the workers' messages together. A pair is good when both of its members say so."""
    by_kind: dict[str, list[Message]] = {}
    for message in messages:
        by_kind.setdefault(str(message.get("kind")), []).append(message)
    reduced = by_kind.get("all_reduce", [])
    clocks: Mapping[str, float] = next((m["clock"] for m in reduced if "clock" in m), {})
    heard = {message.get("member") for message in messages}
    gemm: dict[str, Facts] = {m["member"]: m["gemm"] for m in by_kind.get("gemm", [])}
    return NetworkReport(
        members=members,
        all_reduce={m["member"]: m["error"] for m in reduced},
        all_reduce_seconds=max((m["seconds"] for m in reduced), default=0.0),
        pairs=_pairs(request, by_kind.get("pair", []), first_round),
        clock={request.members[int(n)].name: ahead for n, ahead in clocks.items()},
        gemm=gemm,
        absent={m.name: tails.get(m.name, "") for m in members if m.name not in heard},
    )


def _pairs(
    request: NetworkRequest, messages: Sequence[Message], first_round: int
) -> list[PairResult]:
    said: dict[tuple[int, str], dict[str, Any]] = {(m["round"], m["member"]): m for m in messages}
    results = []
    for number, pairs in enumerate(request.rounds):
        for first, second in pairs:
            names = [request.members[first].name, request.members[second].name]
            halves = [said.get((number, name)) for name in names]
            errors = [
                half["error"] if half else f"{name} gave no result"
                for name, half in zip(names, halves, strict=True)
            ]
            told = [half for half in halves if half]
            results.append(
                PairResult(
                    round=first_round + number,
                    a=names[0],
                    b=names[1],
                    ok=not any(errors),
                    seconds=max((half["seconds"] for half in told), default=0.0),
                    mb_per_s=min((half.get("mb_per_s", 0.0) for half in told), default=0.0),
                    error="; ".join(dict.fromkeys(filter(None, errors))),
                )
            )
    return results
