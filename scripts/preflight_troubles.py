"""Real trouble for preflight on private Slurm clusters, and what may be named for it.

The truth of each trouble was written before its first run: which nodes or links may be named.
Naming anything else is the worst answer; "not sure" is a good one. Only root makes networks.
"""

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import private_slurm
from private_slurm import control

from shakedown.cluster.nodes import free_port
from shakedown.core.verdict import Finding, Verdict, read_verdict

BAD = "n3"
# The first node, where srun is, is never the bad one.
_OTHERS = ("n2", "n3", "n4", "n5")
_PATIENCE, _PREFLIGHT_PATIENCE = 120.0, 400.0  # seconds
_SYN = ("tcp", "flags", "&", "(syn|ack)", "==", "syn")


@dataclass
class Site:
    """A cluster of which one node gets into trouble."""

    cluster: private_slurm.Cluster
    folder: Path

    def on(self, node: str, *command: str) -> None:
        """Run a command in the node's network namespace."""
        space = self.cluster.plan.namespace(node)
        subprocess.run(["ip", "netns", "exec", space, *command], check=True)

    def address(self, node: str) -> str:
        return self.cluster.plan.hosts[node]

    def slurm(self, *command: str) -> str:
        """What a command of Slurm's prints."""
        outer = {n: value for n, value in os.environ.items() if not n.startswith("SLURM_")}
        variables = {**outer, "OMP_NUM_THREADS": "1", **self.cluster.environment}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        return done.stdout

    def idle(self) -> int:
        found = self.slurm("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N %T")
        return sum(not line.endswith("*") for line in found.splitlines())

    def worker(self) -> int:
        """The bad node's network worker; 0 while there is none."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            name = f"SLURM_CLUSTER_NAME={self.cluster.plan.name}".encode()
            if {name, f"SLURMD_NODENAME={BAD}".encode()} <= set(variables) and (
                words[0].endswith(b"python") and b"shakedown.preflight.network" in words
            ):
                return int(entry.name)
        return 0


@contextmanager
def private_site(*, own_networks: bool) -> Iterator[Site]:
    """A cluster of five nodes that is gone, with its folder, at the end."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # Unix sockets need a short path
    cluster = private_slurm.start(
        folder, accounting="none", nodes=5, cpus=2, own_networks=own_networks
    )
    try:
        yield Site(cluster, folder / "jobs")
    finally:
        private_slurm.stop(folder)
        shutil.rmtree(folder)


# --- troubles


@contextmanager
def nothing(_site: Site) -> Iterator[None]:
    yield


@contextmanager
def _dropped(site: Site, *rule: str) -> Iterator[None]:
    """Drop what comes into the bad node and matches, but for what Slurm itself needs."""
    site.on(BAD, "nft", "add", "table", "inet", "trouble")
    chain = "{ type filter hook input priority 0; }"
    site.on(BAD, "nft", "add", "chain", "inet", "trouble", "in", chain)
    port = str(site.cluster.plan.node_ports[site.cluster.plan.nodes.index(BAD)])
    start = ("nft", "add", "rule", "inet", "trouble", "in")
    site.on(BAD, *start, "tcp", "dport", port, "accept")
    site.on(BAD, *start, *rule)
    yield
    site.on(BAD, "nft", "delete", "table", "inet", "trouble")


@contextmanager
def no_way_in(site: Site) -> Iterator[None]:
    with _dropped(site, *_SYN, "drop"):
        yield


@contextmanager
def refused(site: Site) -> Iterator[None]:
    with _dropped(site, *_SYN, "reject", "with", "tcp", "reset"):
        yield


@contextmanager
def one_direction(site: Site) -> Iterator[None]:
    with _dropped(site, "ip", "saddr", site.address("n2"), *_SYN, "drop"):
        yield


@contextmanager
def large_packets_lost(site: Site) -> Iterator[None]:
    # not of the first node, where srun is: that would be Slurm's trouble too
    first = site.address("n1")
    with _dropped(site, "ip", "saddr", "!=", first, "meta", "length", ">", "1000", "drop"):
        yield


@contextmanager
def slow_interface(site: Site) -> Iterator[None]:
    limit = ("tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms")
    site.on(BAD, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)
    yield
    site.on(BAD, "tc", "qdisc", "del", "dev", "eth0", "root")


@contextmanager
def unplugged(site: Site) -> Iterator[None]:
    site.on(BAD, "ip", "link", "set", "eth0", "down")
    yield
    site.on(BAD, "ip", "link", "set", "eth0", "up")


@contextmanager
def slurmd_dead(site: Site) -> Iterator[None]:
    control.kill(site.cluster.plan.folder, f"slurmd-{BAD}")
    yield
    control.start(site.cluster.plan.folder, f"slurmd-{BAD}")


@contextmanager
def slurmd_frozen(site: Site) -> Iterator[None]:
    control.pause(site.cluster.plan.folder, f"slurmd-{BAD}")
    yield
    control.resume(site.cluster.plan.folder, f"slurmd-{BAD}")


@contextmanager
def power_cut(site: Site) -> Iterator[None]:
    control.lose(site.cluster.plan.folder, f"slurmd-{BAD}")
    yield
    control.start(site.cluster.plan.folder, f"slurmd-{BAD}")


@contextmanager
def worker_stopped(site: Site) -> Iterator[None]:
    _wait_for(lambda: site.worker() > 0, "the worker")
    time.sleep(0.5)
    os.kill(site.worker(), signal.SIGSTOP)
    yield


@contextmanager
def worker_killed(site: Site) -> Iterator[None]:
    _wait_for(lambda: site.worker() > 0, "the worker")
    time.sleep(1.0)
    os.kill(site.worker(), signal.SIGKILL)
    yield


# --- cases


_NETWORK = "answered; network"  # what preflight says when the probes are done


@dataclass(frozen=True)
class Case:
    """A trouble, when it begins, and what may be named.

    Attributes:
        nodes: the list of bad nodes, exactly.
        pairs: those that failed findings may name.
        after: words of preflight after which it begins; without them it is there from the start.
        needs_network: it is a trouble of a network that only nodes with their own have.
        faults: `KIND:NODE` to inject.
    """

    trouble: Callable[[Site], AbstractContextManager[None]]
    nodes: tuple[str, ...] = (BAD,)
    pairs: tuple[str, ...] = ()
    after: str = ""
    tier: str = "quick"
    needs_network: bool = False
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        late = " after probing" if self.after else ""
        tier = "" if self.tier == "quick" else f" ({self.tier})"
        return f"{self.trouble.__name__}{late}{tier}"

    def is_right(self, verdict: Verdict) -> bool:
        """Whether exactly those at fault are named."""
        named = named_pairs(verdict)
        return (
            verdict.extra["bad_nodes"] == sorted(self.nodes)
            and named <= set(self.pairs)
            and bool(self.pairs) <= bool(named)
            and (verdict.status == "PASS") == (not self.nodes and not self.pairs)
        )

    def innocents(self, verdict: Verdict) -> list[str]:
        """Nodes and pairs that are named and have nothing."""
        nodes = set(verdict.extra["bad_nodes"]) - set(self.nodes)
        pairs = {
            pair
            for pair in named_pairs(verdict) - set(self.pairs)
            if not set(self.nodes) & set(pair.split(","))
        }
        return sorted(nodes | pairs)


def named_pairs(verdict: Verdict) -> set[str]:
    """Links that a finding says something bad of."""
    return {f.subject for f in verdict.findings if f.scope == "pair" and f.status != "pass"}


CASES = [
    Case(nothing, nodes=()),
    Case(nothing, nodes=(), tier="standard"),
    Case(no_way_in, needs_network=True),
    Case(refused, needs_network=True),
    Case(one_direction, nodes=(), pairs=("n2,n3",), needs_network=True),
    Case(large_packets_lost, needs_network=True),
    Case(slow_interface, tier="standard", needs_network=True),
    Case(unplugged, needs_network=True),
    Case(unplugged, after=_NETWORK, needs_network=True),
    Case(slurmd_dead),
    Case(slurmd_dead, after=_NETWORK),
    Case(slurmd_frozen),
    Case(power_cut),
    Case(power_cut, after=_NETWORK),
    Case(worker_stopped, after=_NETWORK),
    Case(worker_killed, after=_NETWORK),
]
# Of preflight's own, those that need no GPU and no server.
_QUICK_FAULTS = (
    "no_disk slow_disk no_locks stale_model low_shm low_limits gpu_missing gloo_dead version_skew "
    "clock_skew name_resolution port_busy invisible_file model_unreadable probe_hang probe_dead"
).split()
_STANDARD_FAULTS = ["slow_node", "wrong_math"]
WARNED = ("slow_disk", "no_locks")  # the node is warned of, and no bad one


def injected_cases(seed: int) -> list[Case]:
    """Every fault that can be injected once, up to three at a time, each on a node of its own."""
    draw = random.Random(seed)
    kinds = draw.sample(_QUICK_FAULTS, len(_QUICK_FAULTS))
    groups = [(kinds[i : i + 3], "quick") for i in range(0, len(kinds), 3)]
    cases = []
    for some, tier in [*groups, (_STANDARD_FAULTS, "standard")]:
        nodes = draw.sample(_OTHERS, len(some))
        faults = tuple(f"{kind}:{node}" for kind, node in zip(some, nodes, strict=True))
        bad = [node for kind, node in zip(some, nodes, strict=True) if kind not in WARNED]
        cases.append(Case(nothing, nodes=tuple(bad), tier=tier, faults=faults))
    return cases


def preflight(site: Site, case: Case) -> Verdict:
    """The verdict of a job over all nodes that preflight ran in.

    Raises:
        TimeoutError: preflight, or the cluster before it or after, takes too long.
    """
    shutil.rmtree(site.folder, ignore_errors=True)
    out = site.folder / "out"
    out.mkdir(parents=True)
    (site.folder / "model").write_text("x")
    log = site.folder / "job.log"
    nodes = len(site.cluster.plan.nodes)
    _wait_for(lambda: site.idle() == nodes, "idle nodes")
    asked = ["--tier", case.tier, "--out", str(out)]
    if case.faults:
        asked += ["--timeout", "8", "--path", str(site.folder / "model")]
        asked += ["--port", str(free_port(""))]
        asked += [word for fault in case.faults for word in ("--fake-fault", fault)]
    command = shlex.join([sys.executable, "-P", "-m", "shakedown.cli", "preflight", *asked])
    script = f"#!/bin/bash\n{'' if case.after else 'until [ -e go ]; do sleep 0.1; done'}\n"
    (site.folder / "job.sh").write_text(f"{script}{command}\ntouch ended\n")
    # Nothing would be left to tell of a failed node otherwise.
    options = ["--no-kill", f"--nodes={nodes}", f"--ntasks={nodes}", f"--output={log}"]
    site.slurm("sbatch", *options, f"--chdir={site.folder}", str(site.folder / "job.sh"))
    if case.after:
        _wait_for(lambda: log.exists() and case.after in log.read_text(), case.after)
        _wait_for(lambda: site.worker() > 0, "the network worker")
    else:
        _wait_for(log.exists, "the job")
    with case.trouble(site):
        (site.folder / "go").touch()
        _wait_for((site.folder / "ended").exists, "the end of preflight", _PREFLIGHT_PATIENCE)
    _wait_for(lambda: not site.slurm("squeue", "--noheader"), "an empty queue")
    return read_verdict(out / "verdict.json")


def _wait_for(condition: Callable[[], bool], what: str, seconds: float = _PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain for: {what}")
        time.sleep(0.2)


def told(verdict: Verdict) -> str:
    """What preflight found wrong, a line each."""

    def line(f: Finding) -> str:
        return f"{f.status} {f.check} {f.scope} {f.subject}: {f.measured} [{f.remedy}]"

    return "\n".join(line(f) for f in verdict.findings if f.status != "pass")
