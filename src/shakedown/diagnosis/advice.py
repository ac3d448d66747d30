"""What to do next and the command for it, from a diagnosis. Pure."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shakedown.core.verdict import Verdict
from shakedown.diagnosis.analyze.liveness import SECOND_LOOK
from shakedown.diagnosis.analyze.model import Hypothesis
from shakedown.diagnosis.facts import Facts
from shakedown.slurm.hostlist import is_node_name

_LINK = frozenset({"network", "nccl_internal"})
_AGAIN = "while the job stands: sample it again (--match: a part of the command line)"
_CALLS = frozenset(
    "collective_mismatch conditional_collective size_mismatch dtype_mismatch "
    "cross_group_cycle".split()
)
_COMPARE = "after the change: let torch compare every call of one short run (slow)"
_RECORD = "before the next run: let every rank keep its last calls (Flight Recorder)"
_PROCESS = frozenset(
    "missing_rank rank_busy init_deadlock dataloader storage two_threads_one_group "
    "host_sync_divergence uneven_inputs rollout_starvation weight_sync_one_sided "
    "server_unhealthy unknown".split()
)


def steps(verdict: Verdict) -> list[tuple[str, str]]:
    """(what, command) in order; a command may be empty. Names from inputs are quoted."""
    diagnosis: Mapping[str, Any] = verdict.extra["diagnosis"]
    remedies = list(dict.fromkeys(f.remedy for f in verdict.findings if f.remedy))
    first = remedies[0] if remedies else "the next command"
    found = [(first, verdict.next)] if remedies or verdict.next else []
    found += [(text, "") for text in remedies[1:]]
    found += [(f"to be sure: {text}", "") for text in diagnosis["needed"]]
    return [*found, *_commands(diagnosis, verdict)]


# Causes that lie in the machines: these are looked at before the next run.
_MACHINES = frozenset({"network", "nccl_internal", "node_dead", "storage", "gpu_error"})
_TITLE = re.compile(r"(\w+::)")  # of a process that names itself, as Ray's and vLLM's do
_SCRIPT = re.compile(r"(?:^|[\s/])([\w.-]{1,80}\.py)\b")


def next_command(
    chosen: Hypothesis,
    facts: Facts,
    attempt: Path | None,
    given: Sequence[Path],
    again: str = "",
) -> str:
    """The command to run next, with its arguments: evidence that is wanting first, then what the
    cause asks for.

    Args:
        attempt: the folder of our own stage's attempt, None for anybody else's job.
        given: the inputs of this diagnosis.
        again: what goes on with the attempt's stage.
    """
    if chosen.cause == "healthy":
        return ""
    if chosen.state == "slow" or chosen.second_look_after:
        seconds = chosen.second_look_after or SECOND_LOOK
        return f"{_collect_job(facts)} --gap {seconds}"
    if chosen.cause in _MACHINES:
        return "shakedown preflight --out preflight"
    if attempt is not None:
        return _of_stage(chosen, attempt) or again
    if chosen.state == "hung" or (chosen.cause == "unknown" and chosen.state != "exited"):
        return _collect_job(facts)
    paths = shlex.join(map(str, given[:8]))
    return f"shakedown hang analyze {paths} --full --html diagnosis.html"


def _of_stage(chosen: Hypothesis, attempt: Path) -> str:
    """To see what the server of a stage of ours does."""
    if chosen.cause != "server_unhealthy":
        return ""
    return f"shakedown status {shlex.quote(str(attempt.parents[3]))}"


def _collect_job(facts: Facts) -> str:
    """By the Slurm job where one is known, else by the program's name."""
    jobs = [e.detail.get("job") for e in facts.all_events() if e.kind == "job"]
    job = next((str(j) for j in jobs if j and str(j).isdecimal()), "")
    if job:
        return f"shakedown hang collect --job {job} --out evidence"
    components = [*facts.ranks.values(), *facts.roles.values()]
    commands = [stack.command for c in components for stack in c.stacks if stack.command]
    commands += [stack.command for stack in facts.unplaced if stack.command]
    scripts = [match[1] for command in commands if (match := _SCRIPT.search(command))]
    scripts += [match[1] for command in commands if (match := _TITLE.match(command))]
    program = shlex.quote(scripts[0]) if scripts else "train"
    return f"shakedown hang collect --match {program} --out evidence"


def _commands(diagnosis: Mapping[str, Any], verdict: Verdict) -> list[tuple[str, str]]:
    cause = diagnosis["cause"]
    nodes = [n for n in diagnosis["culprits"]["nodes"] if is_node_name(str(n))]
    nodes = nodes or _hosts(diagnosis["culprits"]["ranks"], verdict.extra.get("hosts", {}))
    found = []
    if cause in _LINK and not verdict.next.startswith("shakedown preflight"):
        found.append(("check the nodes and their links", "shakedown preflight --out preflight"))
    if cause == "node_dead" and nodes:
        listed = shlex.quote(",".join(nodes[:8]))
        found.append(("see why Slurm gave the node up", f"scontrol show node {listed}"))
    if cause in _PROCESS and "hang collect" not in verdict.next:
        found.append((_AGAIN, _collect(nodes)))
    if cause in _CALLS:
        found.append((_COMPARE, "export TORCH_DISTRIBUTED_DEBUG=DETAIL"))
    if diagnosis["state"] == "hung" and not verdict.extra.get("timeline"):
        # 2000 entries a rank: the default of torch 2.13. With 0 nothing is recorded.
        found.append((_RECORD, "export TORCH_FR_BUFFER_SIZE=2000"))
    return found


def _collect(nodes: Sequence[str]) -> str:
    collect = "shakedown hang collect --match train --out evidence"
    if not nodes:
        return collect
    listed = shlex.quote(",".join(nodes[:8]))
    # --overlap: the hung job holds all of its nodes' resources, and a step without it would wait
    # for them. --kill-on-bad-exit=0: a collector that fails on one node must not end the others.
    return f"srun --overlap --kill-on-bad-exit=0 -w {listed} {collect}"


def _hosts(ranks: Sequence[int], hosts: Mapping[str, str]) -> list[str]:
    """Hosts of the first culprits; `hosts` holds ranks as text: `0-3, 8`."""
    wanted = set(list(ranks)[:64])
    found = []
    for host, text in hosts.items():
        if is_node_name(host) and any(a <= r <= b for a, b in spans(text) for r in wanted):
            found.append(host)
    return found


def spans(text: str) -> list[tuple[int, int]]:
    """`0-3, 8` as [(0, 3), (8, 8)]; what is no range is left out."""
    found = []
    for part in str(text).split(", "):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal() and len(part) < 20:
            found.append((int(first), int(last or first)))
    return found
