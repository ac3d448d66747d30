"""Release the network workers' rounds one by one, and combine their answers."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from shakedown.cluster.ranks import loopback_of
from shakedown.preflight.datatypes import NodeFacts, PreflightSettings, Tier, WorkerRequest
from shakedown.preflight.judge_network import pairs_to_repeat
from shakedown.preflight.launch import Launcher, NodeProgram, ProgramMessage
from shakedown.preflight.observed import (
    Member,
    NetworkReport,
    PairResult,
    Reach,
    bad_members,
    failing_pairs,
    node_of,
    pairs_explained,
    without_failures,
)
from shakedown.preflight.rounds import ALL_PAIRS, leaf_of, pair_rounds, repair_pairs
from shakedown.preflight.slurm_messages import blamed_by_srun, tasks_that_ended, was_aborted
from shakedown.slurm.nodes import slurm_leaves, slurm_nodes

_IMPORT_SECONDS = 120.0  # loading torch from a cold shared file system
_LAGGARD_SECONDS = 20.0  # minimum for the others once half of the workers are up
_MARGIN_SECONDS = 5.0  # margin between a worker's own limit and the launcher's
_SLOWEST_MB_PER_S = 10.0  # slower transfers time out: 100 Mbit/s Ethernet
_SRUN_SECONDS = 40.0
_WAVES = 3
_SWEEPS = 3  # repeats of a seemingly slow exchange
_ATTEMPTS = 3


@dataclass(frozen=True)
class _Load:
    """The amount of data and computing of a tier; one exchange of 1 MB shows that a pair works."""

    megabytes: int
    repeats: int
    work: float

    @property
    def slack(self) -> float:
        """The time limit of a pair's transfers in seconds."""
        return 2.0 + 2 * self.megabytes / _SLOWEST_MB_PER_S

    @property
    def gpu_factor(self) -> int:
        """NCCL needs larger transfers to fill a link of 50 GB/s."""
        return 1 if self.repeats == 1 else 16


def _load(tier: Tier, burn: float) -> _Load:
    loads = {
        "quick": _Load(1, 1, 0.0),
        "standard": _Load(32, 5, 3.0),
        "burn": _Load(32, 50, burn),
    }
    return loads[tier]


def check_network(
    launcher: Launcher, settings: PreflightSettings, addresses: Mapping[str, str], token: str
) -> NetworkReport:
    """Run connections, pair rounds and an all-reduce over the nodes of `addresses`.

    If a node is lost meanwhile, Slurm may end the workers of all the others; then it starts again
    without the nodes that Slurm blames.
    """
    if find_spec("torch") is None:  # the workers run with this Python
        why = "torch is not installed: pip install 'slurm-shakedown[train]'"
        return NetworkReport(absent=dict.fromkeys(addresses, why))
    lost: dict[str, str] = {}
    report = NetworkReport()
    for _ in range(_ATTEMPTS):
        left = {node: at for node, at in addresses.items() if node not in lost}
        if not left:
            break
        report, gone = _attempt(launcher, settings, left, token)
        if not gone:
            break
        settings.say(f"lost {', '.join(sorted(gone))}: the others start again")
        lost |= gone
    if settings.slurm:
        lost |= _lost_since(launcher, [node for node in addresses if node not in lost])
    return replace(report, excluded=lost)


def _lost_since(launcher: Launcher, nodes: Sequence[str]) -> dict[str, str]:
    """Nodes on which Slurm no longer starts programs, with its reason."""

    def there(messages: Sequence[ProgramMessage]) -> set[str]:
        return {str(message.get("node")) for message in messages}

    if not nodes:
        return {}
    with launcher.step("shakedown.preflight.probe", ["--present"], [nodes]) as step:
        # srun takes 12 to 20 s to report that a node does not answer.
        step.wait(there, set(nodes), least=_SRUN_SECONDS, most=_SRUN_SECONDS)
        blamed = blamed_by_srun(step.words())
    said = {node: row.lost for node, row in slurm_nodes(nodes).items() if row.lost}
    return {node: why for node, why in {**blamed, **said}.items() if node in nodes}


def _attempt(
    launcher: Launcher, settings: PreflightSettings, addresses: Mapping[str, str], token: str
) -> tuple[NetworkReport, dict[str, str]]:
    """(the report, node -> why Slurm lost it); lost nodes mean that everything must be repeated."""
    nodes = list(addresses)
    tasks = 2 if len(nodes) == 1 else 1
    names = [f"{nodes[0]}#{n}" for n in range(tasks)] if tasks > 1 else nodes
    request = WorkerRequest(
        addresses=addresses,
        token=token,
        limit=min(max(5.0, settings.limit / 2), 10.0),
        faults=settings.faults,
    )
    with launcher.step(
        "shakedown.preflight.network",
        ["--request", request.to_text()],
        [nodes],
        tasks=tasks,
        env={"OMP_NUM_THREADS": "1", **loopback_of(nodes)},
    ) as step:
        rounds = _Rounds(step, names, request.limit, _load(settings.want.tier, settings.burn))
        rounds.run(settings)
        lost = {node: why for node, why in blamed_by_srun(step.words()).items() if node in nodes}
        return rounds.report(), lost if was_aborted(step.words()) else {}


@dataclass
class _Rounds:
    """The rounds of one step. `silent`: members without a result, with the reason."""

    step: NodeProgram
    names: Sequence[str]
    limit: float
    load: _Load
    members: dict[str, Member] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    reach: list[Reach] = field(default_factory=list)
    pairs: list[PairResult] = field(default_factory=list)
    all_reduce: dict[str, str] = field(default_factory=dict)
    all_reduce_seconds: float = 0.0
    work: dict[str, NodeFacts] = field(default_factory=dict)
    number: int = 0

    def run(self, settings: PreflightSettings) -> None:
        """Run everything in order: connections, pairs, re-pairings, all-reduce, processors."""
        self._gather()
        if len(self.members) > 1:
            self._connect()
            self._meet(settings)
            self._repeat_slow(settings)
            self._reduce_all()
        if self.load.work:
            self._compute()
        # A member lost since its last round gives no answer now.
        self._release({"present": True}, set(self._alive()), self.limit)

    def report(self) -> NetworkReport:
        return NetworkReport(
            members=list(self.members.values()),
            backend=self._backend(),
            reach=self.reach,
            pairs=self.pairs,
            all_reduce=self.all_reduce,
            all_reduce_seconds=self.all_reduce_seconds,
            work=self.work,
            absent=self.silent,
        )

    def _backend(self) -> str:
        """NCCL if every member's torch sees a GPU for it."""
        members = self.members.values()
        return "nccl" if members and all(member.has_gpu for member in members) else "gloo"

    def _gather(self) -> None:
        """Wait until the workers listen, and tell all of them the addresses."""

        def known(messages: Sequence[ProgramMessage]) -> set[str]:
            return {m["member"] for m in messages if m["kind"] in ("listening", "failed")}

        self.step.wait(known, set(self.names), least=_LAGGARD_SECONDS, most=_IMPORT_SECONDS)
        said = {m["member"]: m for m in self.step.messages() if m["member"] in self.names}
        for name in self.names:
            message = said.get(name, {})
            if message.get("kind") == "listening":
                keys = ("address", "echo", "store", "gpus")
                self.members[name] = Member(name, **{key: message[key] for key in keys})
            else:
                self.silent[name] = message.get("error") or self._why(name, "it did not start")
        ports = {m.name: [m.address, m.echo, m.store] for m in self.members.values()}
        self.step.tell({"members": ports, "backend": self._backend()})

    def _why(self, name: str, otherwise: str) -> str:
        """How the member's task ended according to srun, or the end of its own log."""
        ended = tasks_that_ended(self.step.words()).get(node_of(name))
        return ended or self.step.tails().get(name) or otherwise

    def _alive(self) -> list[str]:
        return [name for name in self.members if name not in self.silent]

    def _release(
        self, order: Mapping[str, Any], who: set[str], seconds: float
    ) -> dict[str, ProgramMessage]:
        """Member -> its answer to one order. Members without an answer are silent from now on."""
        self.number += 1
        number = self.number
        if not who:
            return {}
        self.step.tell({**order, "round": number})

        def answered(messages: Sequence[ProgramMessage]) -> set[str]:
            return {m["member"] for m in messages if m.get("round") == number}

        limit = seconds + _MARGIN_SECONDS
        there = self.step.wait(answered, who, least=limit, most=limit)
        for name in who - there:
            otherwise = f"its worker gave no answer within {limit:g} s, and Slurm no reason"
            self.silent[name] = self._why(name, otherwise)
        return {m["member"]: m for m in self.step.messages() if m.get("round") == number}

    def _connect(self) -> None:
        """Try connections in both directions, and failed ones once more."""
        again: dict[str, list[str]] = {}
        for targets in ({}, again):
            if targets is again:
                again |= self._unreached()
                if not again:
                    return
            who = set(targets or self._alive())
            # A member's connections share a pool, so they can at most all fail at once.
            answers = self._release({"reach": targets}, who, 3 * self.limit)
            for a, message in answers.items():
                rows = message["to"].items()
                self.reach += [Reach(a=a, b=b, **facts) for b, facts in rows]

    def _unreached(self) -> dict[str, list[str]]:
        failed = [r for r in self.reach if not r.ok and {r.a, r.b} <= set(self._alive())]
        return {a: [r.b for r in failed if r.a == a] for a in {r.a for r in failed}}

    def _meet(self, settings: PreflightSettings) -> None:
        """Run pair rounds, then pair each suspect with its own good member."""
        names = list(self.members)
        switches = settings.leaves
        if settings.slurm and len(names) > ALL_PAIRS:
            switches = switches or slurm_leaves()
        leaves = leaf_of(switches, [node_of(name) for name in names])
        for pairs in pair_rounds(len(names), leaves):
            self._exchange([(names[a], names[b]) for a, b in pairs])
        for _ in range(_WAVES):
            wave = next_wave(self._alive(), self.pairs)
            if not wave:
                break
            settings.say(f"re-pairing {len(wave)} suspect(s)")
            self._exchange(wave)

    def _exchange(self, pairs: Sequence[tuple[str, str]], *, alone: bool = False) -> None:
        """Run one round with the pairs that have no known fault yet."""
        able = set(self._alive()) - bad_members(self._counted_reach(), self._counted_pairs())
        unreached = failing_pairs(self._counted_reach(), ())
        free = [p for p in pairs if set(p) <= able and frozenset(p) not in unreached]
        slack = self.load.slack
        order = {
            "pairs": free,
            "megabytes": self.load.megabytes
            * (self.load.gpu_factor if self._backend() == "nccl" else 1),
            "repeats": self.load.repeats,
            "slack": slack,
        }
        who = {name for pair in free for name in pair}
        answers = self._release(order, who, self.limit + slack)
        for a, b in free:
            halves = [answers.get(name) for name in (a, b)]
            self.pairs.append(_pair(self.number, (a, b), halves, alone=alone))

    def _counted_reach(self) -> list[Reach]:
        """Exchanges without silent members, as a lost worker explains its failures."""
        return [r for r in self.reach if not {r.a, r.b} & self.silent.keys()]

    def _counted_pairs(self) -> list[PairResult]:
        return [p for p in self.pairs if not {p.a, p.b} & self.silent.keys()]

    def _repeat_slow(self, settings: PreflightSettings) -> None:
        """Repeat seemingly slow pairs, and pairs to compare with, with nothing else on the
        network."""
        if settings.want.tier == "quick":
            return
        again = pairs_to_repeat(self._counted_pairs())
        if again:
            settings.say(f"repeating {len(again)} pair(s), one at a time")
        for _ in range(_SWEEPS):
            # A passing load must not affect only the pairs of one node.
            for pair in random.sample(again, len(again)):
                self._exchange([pair], alone=True)

    def _reduce_all(self) -> None:
        """Run it over members of which no two failed with each other."""
        reach, pairs = self._counted_reach(), self._counted_pairs()
        good = [name for name in self._alive() if name not in bad_members(reach, pairs)]
        names = without_failures(good, failing_pairs(reach, pairs))
        if len(names) < 2:
            return
        slack = 5.0 + 0.05 * len(names)
        answers = self._release(
            {"all_reduce": names, "slack": slack}, set(names), self.limit + slack
        )
        self.all_reduce = {name: message["error"] for name, message in answers.items()}
        self.all_reduce_seconds = max((m["took"] for m in answers.values()), default=0.0)

    def _compute(self) -> None:
        who = set(self._alive())
        order = {"work": self.load.work}
        answers = self._release(order, who, 3 * self.load.work + 60.0)
        self.work = {name: message["devices"] for name, message in answers.items()}


def next_wave(members: Sequence[str], pairs: Sequence[PairResult]) -> list[tuple[str, str]]:
    """Pairs of one undecided suspect and one good member each; empty when all are decided."""
    unsure = {end for row in pairs_explained(pairs).unsure for end in row.ends}
    proven = {name for p in pairs if p.ok for name in (p.a, p.b)}
    suspects = [n for n, name in enumerate(members) if name in unsure - proven]
    good = [n for n, name in enumerate(members) if name in proven]
    number = {name: n for n, name in enumerate(members)}
    tried = {
        (min(a, b), max(a, b))
        for a, b in ((number[p.a], number[p.b]) for p in pairs if {p.a, p.b} <= number.keys())
    }
    return [(members[a], members[b]) for a, b in repair_pairs(suspects, good, tried)]


def _pair(
    number: int, pair: tuple[str, str], halves: Sequence[ProgramMessage | None], *, alone: bool
) -> PairResult:
    """A pair is good if both members say so."""
    errors = [
        half["error"] if half else f"{name} gave no answer"
        for name, half in zip(pair, halves, strict=True)
    ]
    told = [half for half in halves if half]
    speeds = [half.get("mb_per_s", ()) for half in told]
    return PairResult(
        round=number,
        a=pair[0],
        b=pair[1],
        ok=not any(errors),
        seconds=max((half["took"] for half in told), default=0.0),
        # An exchange is over when both members finish: the slower one counts.
        mb_per_s=[min(turn) for turn in zip(*speeds, strict=False)],
        alone=alone,
        error="; ".join(dict.fromkeys(filter(None, errors))),
    )
