"""What a Ray cluster told the collector: actors that died, what waits for a place, lost nodes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shakedown.core.files import json_as
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import (
    Identity,
    LogEvent,
    NodeState,
    Record,
    SourceRef,
    clean,
    pid_of,
    rank_of,
)
from shakedown.monitor.collect.ray import ACTOR, SCHEMA

HEAD = "ray head"  # the role of the process that knows where all actors are
# Ends that somebody asked for: ray.kill, the last handle gone, the driver's own end.
_INTENDED = re.compile(
    r"INTENDED|ray\.kill|out of scope|OUT_OF_SCOPE|owner has (?:died|exited)|OWNER_DIED"
    r"|job (?:has )?finished|exit_actor"
)
_RANK = re.compile(r"rank[=: _-]?(\d{1,6})\b")
_MESSAGE = re.compile(
    r'error_message: "(.{1,2000}?)(?<!\\)"|"?exception_string"?: "(.{1,2000}?)"', re.S
)
_FULL = re.compile(r"(?i:object store is full|out of disk)|OutOfDisk|ObjectStoreFull")
_UNEXPECTED = 2  # Ray's NodeDeathInfo.UNEXPECTED_TERMINATION
_MOST = 1000  # findings of a kind


@dataclass(frozen=True)
class _Cluster:
    """See monitor/collect/ray.py. `missed`: why the head gave no tables, empty where it did."""

    address: str = ""
    missed: str = ""
    logs: Sequence[str] = ()
    actors: Sequence[Mapping[str, Any]] = ()
    placement_groups: Sequence[Mapping[str, Any]] = ()
    nodes: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class _Body:
    host: str = ""
    clusters: Sequence[_Cluster] = ()


def parse(source: EvidenceFile, body: Any) -> list[Record] | None:
    """Events of actors by their process; None for any other JSON.

    Raises:
        ValueError: such a file with other contents.
    """
    if not isinstance(body, Mapping) or body.get("schema") != SCHEMA:
        return None
    found: list[Record] = []
    for cluster in json_as(_Body, body, unknown="ignore").clusters:
        found += [*_dead(source, cluster), *_waiting(source, cluster), *_nodes(source, cluster)]
        found += _head(source, cluster)
    return found


def _dead(source: EvidenceFile, cluster: _Cluster) -> Iterator[LogEvent]:
    """Of the job whose actors live, else of the newest: a cluster may serve one after another."""
    hosts = {
        row.get("NodeID"): clean(row.get("NodeManagerHostname", ""), 80) for row in cluster.nodes
    }
    living = {row.get("JobID") for row in cluster.actors if row.get("State") != "DEAD"}
    jobs = living or {max((str(row.get("JobID", "")) for row in cluster.actors), default="")}
    dead = [r for r in cluster.actors if r.get("State") == "DEAD" and r.get("JobID") in jobs]
    for row in dead[:_MOST]:
        why = clean(row.get("DeathCause", ""), 3000)
        if _INTENDED.search(why):
            continue
        address = row.get("Address")
        node = address.get("NodeID") if isinstance(address, Mapping) else None
        name = clean(row.get("ActorClassName", ""), 60)
        called = clean(row.get("Name", ""), 80)
        who = Identity(None, pid_of(row.get("Pid")), hosts.get(node, ""))
        yield _died(name, called, who, why, source.place(0, f"{ACTOR} {name} is DEAD"))


def _died(name: str, called: str, who: Identity, why: str, place: SourceRef) -> LogEvent:
    """The end of an actor; its rank is known only where its name has one."""
    number = _RANK.search(called)
    rank = rank_of(int(number[1])) if number else None
    who = replace(who, rank=rank, role=f"{ACTOR} {name}")
    shown = f"{ACTOR} {name}" + (f" {called}" if called else "")
    text = clean(f"{shown} (process {who.pid}) died: {_first_of(why)}")
    return LogEvent("exit", who, text, place, detail={"died": name})


def _first_of(why: str) -> str:
    """The message of Ray's record, up to the advice that follows in each of them."""
    match = _MESSAGE.search(why)
    text = (match[1] or match[2]) if match else why
    text = text.replace("\\n", " ").partition(" Some common causes")[0]
    return text.replace("The actor is dead because its worker process has died. ", "").strip()


def _waiting(source: EvidenceFile, cluster: _Cluster) -> Iterator[LogEvent]:
    for row in cluster.placement_groups[:_MOST]:
        if row.get("state") != "PENDING":
            continue
        stats, bundles = row.get("stats"), row.get("bundles")
        state = stats.get("scheduling_state", "") if isinstance(stats, Mapping) else ""
        wants = list(bundles.values()) if isinstance(bundles, Mapping) else []
        asked = ", ".join(_resources(each) for each in wants[:4])
        more = f" and {len(wants) - 4} more" if len(wants) > 4 else ""
        text = f"placement group {clean(row.get('name', ''), 60)} waits for {asked}{more} ({state})"
        text = clean(" ".join(text.split()))
        yield LogEvent("too_few_gpus", Identity(), text, source.place(0, text))


def _resources(bundle: Any) -> str:
    rows = bundle.items() if isinstance(bundle, Mapping) else ()
    return clean(" + ".join(f"{clean(n, 12)} {clean(name, 40)}" for name, n in rows), 120)


def _nodes(source: EvidenceFile, cluster: _Cluster) -> Iterator[NodeState]:
    for row in cluster.nodes[:_MOST]:
        if row.get("Alive") is False and row.get("DeathReason") == _UNEXPECTED:
            name = clean(row.get("NodeManagerHostname", ""), 80)
            said = clean(row.get("DeathReasonMessage", "")) or "no answer to Ray's health checks"
            yield NodeState(name, f"DEAD in Ray: {said}", down=True, place=source.place(0, said))


def _head(source: EvidenceFile, cluster: _Cluster) -> Iterator[LogEvent]:
    full = [line for line in cluster.logs if _FULL.search(line)]
    lost = [line for line in cluster.logs if not _FULL.search(line)]
    if full:
        text = clean(f"Ray's object store is full: {full[-1]}")
        yield LogEvent("oom", Identity(), text, source.place(0, text))
    # A busy head may be late: only where its own node's daemon misses it too it is gone.
    if cluster.missed and lost:
        text = clean(f"the Ray head at {cluster.address} is gone: {lost[-1]}")
        yield LogEvent(
            "server_unhealthy", Identity(None, None, "", HEAD), text, source.place(0, text)
        )
