"""Preflight on a real Slurm cluster whose nodes have networks of their own, under real trouble.

The truth of each trouble was written before its first run: which nodes, links or directions may be
named. Naming anything else is the worst answer; "not sure" is a good one.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import private_slurm
import pytest
from private_slurm import control

from shakedown.core.verdict import Finding, Verdict, read_verdict
from tests.slurm_fixtures import environment, install_slurm, private_cluster, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="root alone makes network namespaces"),
]
BAD = "n3"
# How often each trouble is tried.
REPEATS = int(os.environ.get("PREFLIGHT_REPEATS", "1"))


@dataclass
class Site:
    """A cluster and one node of it that gets into trouble."""

    cluster: private_slurm.Cluster
    folder: Path

    def on(self, node: str, *command: str) -> None:
        """Run a command in the node's network namespace."""
        space = self.cluster.plan.namespace(node)
        subprocess.run(["ip", "netns", "exec", space, *command], check=True)

    def address(self, node: str) -> str:
        return self.cluster.plan.hosts[node]

    def filter(self, *rule: str) -> None:
        """Drop what comes into the bad node and matches, but for what Slurm itself needs."""
        self.on(BAD, "nft", "add", "table", "inet", "trouble")
        chain = "{ type filter hook input priority 0; }"
        self.on(BAD, "nft", "add", "chain", "inet", "trouble", "in", chain)
        port = str(self.cluster.plan.node_ports[self.cluster.plan.nodes.index(BAD)])
        start = ("nft", "add", "rule", "inet", "trouble", "in")
        self.on(BAD, *start, "tcp", "dport", port, "accept")
        self.on(BAD, *start, *rule)

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


SYN = ("tcp", "flags", "&", "(syn|ack)", "==", "syn")


@contextmanager
def nothing(_site: Site) -> Iterator[None]:
    yield


@contextmanager
def no_way_in(site: Site) -> Iterator[None]:
    with dropped(site, *SYN, "drop"):
        yield


@contextmanager
def refused(site: Site) -> Iterator[None]:
    with dropped(site, *SYN, "reject", "with", "tcp", "reset"):
        yield


@contextmanager
def one_direction(site: Site) -> Iterator[None]:
    with dropped(site, "ip", "saddr", site.address("n2"), *SYN, "drop"):
        yield


@contextmanager
def large_packets_lost(site: Site) -> Iterator[None]:
    # not of the first node, where srun is: that would be Slurm's trouble too
    with dropped(
        site, "ip", "saddr", "!=", site.address("n1"), "meta", "length", ">", "1000", "drop"
    ):
        yield


@contextmanager
def dropped(site: Site, *rule: str) -> Iterator[None]:
    site.filter(*rule)
    yield
    site.on(BAD, "nft", "delete", "table", "inet", "trouble")


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
    wait_for(lambda: site.worker() > 0, "the worker")
    time.sleep(0.5)
    os.kill(site.worker(), signal.SIGSTOP)
    yield


@contextmanager
def worker_killed(site: Site) -> Iterator[None]:
    wait_for(lambda: site.worker() > 0, "the worker")
    time.sleep(1.0)
    os.kill(site.worker(), signal.SIGKILL)
    yield


Trouble = Callable[[Site], Any]
NETWORK = "answered; network"  # what preflight says when the probes are done


@dataclass(frozen=True)
class Case:
    """A trouble, when it begins, and what may be named.

    `after`: words of preflight after which it begins; it is there from the start without them.
    `nodes`: the list of bad nodes, exactly. `pairs`: those that failed findings may name.
    """

    trouble: Trouble
    nodes: tuple[str, ...] = (BAD,)
    pairs: tuple[str, ...] = ()
    after: str = ""
    tier: str = "quick"

    def __str__(self) -> str:
        return f"{self.trouble.__name__}{' after probing' if self.after else ''}"


CASES = [
    Case(nothing, nodes=()),
    Case(nothing, nodes=(), tier="standard"),
    Case(no_way_in),
    Case(refused),
    Case(one_direction, nodes=(), pairs=("n2,n3",)),
    Case(large_packets_lost),
    Case(slow_interface, tier="standard"),
    Case(unplugged),
    Case(unplugged, after=NETWORK),
    Case(slurmd_dead),
    Case(slurmd_dead, after=NETWORK),
    Case(slurmd_frozen),
    Case(power_cut),
    Case(power_cut, after=NETWORK),
    Case(worker_stopped, after=NETWORK),
    Case(worker_killed, after=NETWORK),
]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    install_slurm()
    with private_cluster(accounting="none", nodes=5, cpus=2, own_networks=True) as cluster:
        yield Site(cluster, cluster.plan.folder / "jobs")


def _marked(case: Case) -> Any:
    """All but one are left to `make test-all`: each takes half a minute."""
    return case if case.trouble is no_way_in else pytest.param(case, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("turn", range(REPEATS))
@pytest.mark.parametrize("case", [_marked(case) for case in CASES], ids=str)
def test_whoever_is_at_fault_is_named_and_nobody_else(site: Site, case: Case, turn: int) -> None:
    verdict = preflight(site, case)

    assert verdict.extra["bad_nodes"] == sorted(case.nodes), told(verdict)
    named = {f.subject for f in verdict.findings if f.scope == "pair" and f.status != "pass"}
    assert named <= set(case.pairs), told(verdict)
    assert bool(case.pairs) <= bool(named), told(verdict)
    assert (verdict.status == "PASS") == (not case.nodes and not case.pairs), told(verdict)


def preflight(site: Site, case: Case) -> Verdict:
    """The verdict of a job over all nodes that preflight ran in."""
    shutil.rmtree(site.folder, ignore_errors=True)
    out = site.folder / "out"
    out.mkdir(parents=True)
    log = site.folder / "job.log"
    wait_for(lambda: idle(site) == len(site.cluster.plan.nodes), "idle nodes")
    command = f"{sys.executable} -P -m shakedown.cli preflight --tier {case.tier} --out {out}"
    script = f"#!/bin/bash\n{'' if case.after else 'until [ -e go ]; do sleep 0.1; done'}\n"
    (site.folder / "job.sh").write_text(f"{script}{command}\ntouch ended\n")
    nodes = len(site.cluster.plan.nodes)
    # Nothing would be left to tell of a failed node otherwise. The first node is never the bad one.
    options = ["--no-kill", f"--nodes={nodes}", f"--ntasks={nodes}", f"--output={log}"]
    slurm(site, "sbatch", *options, f"--chdir={site.folder}", str(site.folder / "job.sh"))
    if case.after:
        wait_for(lambda: log.exists() and case.after in log.read_text(), case.after)
        wait_for(lambda: site.worker() > 0, "the network worker")
    else:
        wait_for(log.exists, "the job")
    with case.trouble(site):
        (site.folder / "go").touch()
        wait_for((site.folder / "ended").exists, "the end of preflight", 400)
    print(log.read_text())
    wait_for(lambda: not slurm(site, "squeue", "--noheader"), "an empty queue")
    return read_verdict(out / "verdict.json")


def idle(site: Site) -> int:
    found = slurm(site, "sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N %T")
    return sum(not line.endswith("*") for line in found.splitlines())


def slurm(site: Site, *command: str) -> str:
    variables = environment(site.cluster)
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


def told(verdict: Verdict) -> str:
    def line(f: Finding) -> str:
        return f"{f.status} {f.check} {f.scope} {f.subject}: {f.measured} [{f.remedy}]"

    return "\n".join(line(f) for f in verdict.findings if f.status != "pass")
