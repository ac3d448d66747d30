"""`shakedown preflight`: check nodes, network and disks before anything is started."""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from shakedown.cluster.folder_lease import hold
from shakedown.commands.arguments import above_zero, add_strict, place, run_config, whole
from shakedown.config import Config
from shakedown.config.capacity import stage_placement
from shakedown.core.continued import begin_command, next_command
from shakedown.core.errors import CannotJudgeError, ExitCode, StorageError, UsageError
from shakedown.core.folders import remove_earlier
from shakedown.core.paths import PreflightPaths
from shakedown.core.verdict import finish, render_text
from shakedown.data_sources.source import HUB_PREFIX, parse_source
from shakedown.preflight.checks.baseline import read_baseline, record_baseline
from shakedown.preflight.datatypes import Expectations, Tier
from shakedown.preflight.faults import FAULTS, parse_fault
from shakedown.preflight.node_check import MODES, check_this_node
from shakedown.slurm.hostlist import allocation_nodes, expand_nodelist, node_name

if TYPE_CHECKING:
    from shakedown.preflight.datatypes import PreflightSettings
    from shakedown.preflight.run import Checked

_ONCE_SECONDS = 10.0  # Slurm ends a HealthCheckProgram after 60 s, and a job waits for its Prolog
EXAMPLES = (
    "shakedown preflight --nodes 2 --expect-gpus 8 --out results/preflight",
    "shakedown preflight history --config config/config.yaml",
)


def _history_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=["history"], help="history: show each node's pass/fail history"
    )
    parser.add_argument(
        "--history", type=Path, metavar="FILE", help="the nodes' history (default: the config's)"
    )
    parser.add_argument(
        "--forgive", metavar="NODE", help="with history: forget the failures of a repaired node"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; those left out come from the config, if one is given."""
    _history_arguments(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="a run's config file")
    _node_arguments(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="results folder that all nodes share"
    )
    _requirement_arguments(parser)
    _extent_arguments(parser)
    parser.add_argument(
        "--fake-fault",
        action="append",
        default=[],
        metavar="KIND[:NODE]",
        help=f"inject a fault for a drill: {', '.join(FAULTS)}",
    )
    parser.add_argument(
        "--once",
        choices=MODES,
        help="check only this node and print one line, with the exit codes that the caller expects",
    )
    parser.add_argument(
        "--baseline", type=Path, metavar="FILE", help="compare with recorded values"
    )
    parser.add_argument(
        "--record-baseline", type=Path, metavar="FILE", help="record the nodes' values if they pass"
    )
    add_strict(parser)


def _node_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--job",
        metavar="ID",
        help="check the nodes of this running Slurm job of yours, from anywhere",
    )
    parser.add_argument(
        "--nodes",
        type=_nodes,
        metavar="N|LIST",
        help="nodes the run needs: how many of the allocation, or which ones, as n1,n[3-4]",
    )
    parser.add_argument(
        "--spare-nodes",
        type=whole(0, 65536),
        metavar="N",
        help="spare nodes to replace bad ones",
    )


def _requirement_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--expect-gpus", type=whole(0, 1024), metavar="N", help="GPUs on each node")
    parser.add_argument(
        "--path",
        action="append",
        type=place,
        default=[],
        help="file or folder that all nodes must be able to read; repeatable",
    )
    parser.add_argument(
        "--port",
        action="append",
        default=[],
        type=whole(1, 65535),
        help="port that must be free; repeatable",
    )
    parser.add_argument(
        "--min-free-disk-gb", type=float, metavar="GB", help="free disk space needed"
    )
    parser.add_argument("--min-shm-mb", type=float, metavar="MB", help="shared memory needed")


def _extent_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tier",
        choices=get_args(Tier),
        help="how thorough the checks are (default: the config's, or quick)",
    )
    parser.add_argument(
        "--timeout", type=above_zero, metavar="S", help="time limit of one check in seconds"
    )
    parser.add_argument(
        "--burn-seconds",
        type=above_zero,
        default=600.0,
        metavar="S",
        help="length of the burn tier in seconds",
    )


def _nodes(text: str) -> int | list[str]:
    """The number of nodes, or their names."""
    if text.isdecimal():
        return whole(1, 65536)(text)
    try:
        return list(dict.fromkeys(expand_nodelist(text)))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error.args[0])) from None


def run(args: argparse.Namespace) -> int:
    """Check the allocation's nodes or, outside an allocation, this machine.

    Raises:
        UsageError: an option or the config cannot be used.
        RefusedError: another process writes the results folder.
        CannotJudgeError: the job of `--job` is not running.
        StorageError: the results folder cannot be written.
    """
    from shakedown.preflight.datatypes import PreflightSettings

    config = run_config([args.config]) if args.config else None
    if args.action == "history":
        return _history(args, config)
    if args.once:
        return _run_once(args, config)
    if args.job is not None:
        _enter(args.job)
    out = args.out or (config.paths.preflight.root if config else None)
    if out is None:
        raise UsageError("no results folder: give --out DIR or --config FILE")
    want = _expectations(args, config)
    spares = config.preflight.spare_nodes if config else 0
    spares = args.spare_nodes if args.spare_nodes is not None else spares
    spares = 0 if isinstance(args.nodes, Sequence) else spares  # these nodes and no others
    nodes = _chosen(args.nodes, want.nodes + spares)
    settings = PreflightSettings(
        nodes=nodes,
        out=out,
        want=want,
        slurm="SLURM_JOB_ID" in os.environ,
        srun_args=config.cluster.srun_args if config else (),
        spares=max(0, len(nodes) - want.nodes),
        leaves=_leaves(config) if config else {},
        limit=args.timeout or (config.preflight.probe_timeout if config else 20.0),
        burn=args.burn_seconds,
        ports=args.port,
        faults=[parse_fault(text, nodes) for text in args.fake_fault],
        after=_after(out, args.config),
        say=lambda text: print(f"preflight: {text}", flush=True),
    )
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(StorageError):  # the disk is one of the things checked
            stack.enter_context(hold(out, "shakedown preflight"))
            remove_earlier(PreflightPaths(out).verdict)
        return _check(settings, args, config)


def _check(settings: "PreflightSettings", args: argparse.Namespace, config: Config | None) -> int:
    from shakedown.preflight.run import run_preflight

    checked = run_preflight(settings)
    try:
        checked.write(settings.out)
        _remember(checked, args, config)
        if args.record_baseline and checked.verdict.status in ("PASS", "WARN"):
            record_baseline(args.record_baseline, checked.reports)
        return finish(checked.verdict, PreflightPaths(settings.out).verdict, strict=args.strict)
    except StorageError:
        print(render_text(checked.verdict))  # findings must not be lost with the disk
        raise


def _after(out: Path, config: Path | None) -> str:
    known = next_command(out.parent, further=True)
    return known or (begin_command([config]) if config else "")


def _enter(job_id: str) -> None:
    """Enter the job's allocation: from here on srun accepts steps of this process.

    Raises:
        CannotJudgeError: Slurm cannot be asked, or the job is not running.
    """
    from shakedown.slurm.records import check_job_id, describe

    described, _, lost = describe(check_job_id(job_id))
    state = described.get("JobState", "")
    if state != "RUNNING":
        why = f"is {state} and has no nodes to check" if state else lost or "is not known to Slurm"
        raise CannotJudgeError(f"--job {job_id}: {why}", hint="squeue --me")
    if "HetJobId" in described:
        raise CannotJudgeError(
            f"--job {job_id}: it is a heterogeneous job, and a step reaches the nodes of only one "
            "of its components",
            hint="inside the job: srun --het-group=0 shakedown preflight --once nagios",
        )
    # This process may itself run in another job.
    for name in [n for n in os.environ if n.startswith("SLURM_") and n != "SLURM_CONF"]:
        del os.environ[name]
    os.environ["SLURM_JOB_ID"] = described.get("JobId", job_id)
    os.environ["SLURM_JOB_NODELIST"] = described.get("NodeList", "")


def _chosen(given: int | Sequence[str] | None, most: int) -> list[str]:
    """The nodes to check; fewer than wanted is a finding, not a usage error.

    Raises:
        UsageError: a named node is not in the allocation.
    """
    allocated = allocation_nodes()
    if not isinstance(given, Sequence):
        return allocated[:most]
    others = [node for node in given if node not in allocated]
    if others:
        raise UsageError(
            f"--nodes: {', '.join(others[:8])} is not in this allocation, which has "
            f"{', '.join(allocated[:8])}",
            hint=f"shakedown preflight --job ID --nodes ..., or salloc --nodelist={others[0]}",
        )
    return list(given)


def _remember(checked: "Checked", args: argparse.Namespace, config: Config | None) -> None:
    """Add the judgements to the nodes' history, which decides which nodes later jobs avoid."""
    from shakedown.preflight.history import exclude_known, remember

    path = args.history or (config.paths.node_history if config else None)
    if path is None or "SLURM_JOB_ID" not in os.environ:  # this machine alone is not a cluster node
        return
    remember(path, checked.looks(config.run if config else ""))
    if config:
        hours = config.preflight.exclude_hours
        exclude_known(path, hours, config.paths.excluded_nodes)


def _history(args: argparse.Namespace, config: Config | None) -> int:
    """Print every node's record, most failures first."""
    from shakedown.preflight.history import REPEATED, excluded, forgive, records

    path = args.history or (config.paths.node_history if config else None)
    if path is None:
        raise UsageError("no history file: give --history FILE or --config FILE")
    if args.forgive:
        print(f"{args.forgive}: {forgive(path, args.forgive)} record(s) forgotten")
        return int(ExitCode.OK)
    hours = config.preflight.exclude_hours if config else 24.0
    kept_off = excluded(path, hours)
    found = records(path)
    if not found:
        print(f"no node has been checked yet: {path}")
    for record in found:
        state = "kept off" if record.node in kept_off else "in use"
        often = ", repeatedly" if record.failures >= REPEATED else ""
        why = f": {'; '.join(record.reasons[:3])}" if record.reasons else ""
        last = time.strftime("%Y-%m-%d %H:%M", time.gmtime(record.last.time))
        print(
            f"{record.node}  {state}  failed {record.failures} of {record.looks}{often}"
            f"  last {last} UTC{why}"
        )
    return int(ExitCode.OK)


def _run_once(args: argparse.Namespace, config: Config | None) -> int:
    if args.job is not None:
        raise UsageError("--once checks the node that it runs on, so it does not go with --job")
    # One task per node checks it; a TaskProlog runs once for each task.
    if args.once == "task" and os.environ.get("SLURM_LOCALID", "0") != "0":
        return int(ExitCode.OK)
    want = replace(_expectations(args, config), nodes=1)
    faults = [parse_fault(text, [node_name()]) for text in args.fake_fault]
    line, status = check_this_node(want, limit=args.timeout or _ONCE_SECONDS, faults=faults)
    # Slurm copies lines of a TaskProlog's output that begin with `print` to the task's own output.
    print(f"print {line}" if args.once == "task" else line)
    return MODES[args.once][status]


def _expectations(args: argparse.Namespace, config: Config | None) -> Expectations:
    """Options override the config, and the config the defaults."""
    named = len(args.nodes) if isinstance(args.nodes, Sequence) else args.nodes
    given = {
        "nodes": named,
        "gpus": args.expect_gpus,
        "tier": args.tier,
        "min_free_disk_gb": args.min_free_disk_gb,
        "min_shm_mb": args.min_shm_mb,
    }
    base: dict[str, Any] = {}
    if config:
        base = {
            "nodes": config.cluster.nodes,
            "gpus": config.cluster.gpus_per_node,
            "gpu_model": config.cluster.gpu_model,
            "model": config.model.source if Path(config.model.source).is_dir() else "",
            "tier": config.preflight.tier,
            "min_free_disk_gb": config.preflight.min_free_disk_gb,
            "min_shm_mb": config.preflight.min_shm_mb,
        }
    elif args.nodes is None:
        base = {"nodes": len(allocation_nodes())}
    if config:
        base["hub"], base["parts"] = _from_hub(config), _parts(config)
        base["trainers"] = _trainers(config)
    baseline = args.baseline or (config.preflight.baseline if config else "")
    if baseline:
        base["baseline"] = read_baseline(Path(baseline))
    base["paths"] = [*args.path, *(_local_paths(config) if config else [])]
    return Expectations(**{**base, **{k: v for k, v in given.items() if v is not None}})


def _leaves(config: Config) -> dict[str, list[str]]:
    leaves = config.cluster.leaves
    try:
        return {leaf: expand_nodelist(nodes) for leaf, nodes in leaves.items()}
    except UsageError as error:
        raise UsageError(f"cluster.leaves: {error.args[0]}", hint=error.hint) from None


def _local_paths(config: Config) -> Sequence[str]:
    """Files that every node must read: the config's entries written as paths."""
    entries = (config.model.source, config.data.train, config.data.heldout)
    return [entry for entry in dict.fromkeys(entries) if _is_path(entry)]


def _from_hub(config: Config) -> list[str]:
    """Hub names prefixed with their kind, as in the hub's cache."""
    model = config.model.source
    names = [] if model == "demo" or _is_path(model) else [f"models/{model}"]
    for entry in (config.data.train, config.data.heldout):
        place = parse_source(entry, form=config.data.format).place
        if place.startswith(HUB_PREFIX):
            names.append(f"datasets/{place.removeprefix(HUB_PREFIX).partition(':')[0]}")
    return list(dict.fromkeys(names))


def _parts(config: Config) -> list[tuple[str, ...]]:
    """The reward, the agents with their arguments and the sinks of the run."""
    if not config.own_stages:
        return []
    agents = [(config.agents.target, config.agents.kwargs)]
    agents += [(s.grpo.agent, s.grpo.agent_kwargs) for s in config.own_stages.values() if s.grpo]
    sinks = [sink for stage in config.own_stages.values() for sink in stage.sinks]
    parts: list[tuple[str, ...]] = [("reward", config.data.reward)]
    for agent, kwargs in agents:
        if agent:
            parts.append(("agent", agent, *([json.dumps(kwargs)] if kwargs else [])))
    parts += [("sink", sink) for sink in sinks]
    return list(dict.fromkeys(parts))


def _trainers(config: Config) -> list[int]:
    """Numbers of the nodes that a GRPO stage's trainer runs on."""
    gpus = config.cluster.gpus_per_node
    found: set[int] = set()
    for stage in config.own_stages.values():
        if stage.grpo and gpus:
            found |= set(stage_placement(stage, config.serve, gpus).parts[0].nodes)
        elif stage.grpo:
            found |= set(range(stage.nodes))
    return sorted(found)


def _is_path(entry: str) -> bool:
    return entry.startswith((".", "/")) or Path(entry).exists()
