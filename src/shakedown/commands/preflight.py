"""`shakedown preflight`: check nodes, network and disks before anything is started."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from shakedown.cluster.nodes import allocation_nodes
from shakedown.commands.arguments import above_zero, add_strict, place, run_config, whole
from shakedown.config import Config
from shakedown.core.errors import StorageError, UsageError
from shakedown.core.paths import PreflightPaths
from shakedown.core.verdict import finish, render_text
from shakedown.preflight.model import FAULTS, Expectations, Tier, parse_fault

EXAMPLES = (
    "shakedown preflight --nodes 2 --expect-gpus 8 --out results/preflight",
    "shakedown preflight --config config/config.yaml --tier standard",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; those that are left out come from the config, if one is given."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="a run's config file")
    parser.add_argument("--nodes", type=whole(1, 65536), metavar="N", help="nodes the run needs")
    parser.add_argument(
        "--tier", choices=get_args(Tier), help="how much to do (default: the config's, or quick)"
    )
    parser.add_argument("--expect-gpus", type=whole(0, 1024), metavar="N", help="GPUs on each node")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results folder, shared by all")
    parser.add_argument(
        "--path",
        action="append",
        type=place,
        default=[],
        help="a file or folder all nodes must read",
    )
    parser.add_argument(
        "--port", action="append", default=[], type=whole(1, 65535), help="a port that must be free"
    )
    parser.add_argument("--timeout", type=above_zero, metavar="S", help="seconds a check may take")
    parser.add_argument(
        "--burn-seconds",
        type=above_zero,
        default=600.0,
        metavar="S",
        help="length of the burn tier",
    )
    parser.add_argument("--min-free-disk-gb", type=float, metavar="GB", help="free disk needed")
    parser.add_argument("--min-shm-mb", type=float, metavar="MB", help="shared memory needed")
    parser.add_argument(
        "--fake-fault",
        action="append",
        default=[],
        metavar="KIND[:NODE]",
        help=f"inject a fault: {', '.join(FAULTS)}",
    )
    add_strict(parser)


def run(args: argparse.Namespace) -> int:
    """Check the allocation's nodes, or this machine outside of one.

    Raises:
        UsageError: an option or the config cannot be used.
        StorageError: the results folder cannot be written.
    """
    from shakedown.preflight.run import run_preflight
    from shakedown.preflight.settings import Settings

    config = run_config([args.config]) if args.config else None
    out = args.out or (config.paths.preflight.root if config else None)
    if out is None:
        raise UsageError("where should the results go? give --out DIR or --config FILE")
    want = _expectations(args, config)
    nodes = allocation_nodes()[: want.nodes]  # fewer than wanted is a finding, not a usage error
    settings = Settings(
        nodes=nodes,
        out=out,
        want=want,
        slurm="SLURM_JOB_ID" in os.environ,
        srun_args=config.cluster.srun_args if config else (),
        limit=args.timeout or (config.preflight.probe_timeout if config else 20.0),
        burn=args.burn_seconds,
        ports=args.port,
        paths=[*args.path, *(_local_paths(config) if config else [])],
        faults=[parse_fault(text, nodes) for text in args.fake_fault],
        say=lambda text: print(f"preflight: {text}", flush=True),
    )
    checked = run_preflight(settings)
    try:
        checked.write(out)
        return finish(checked.verdict, PreflightPaths(out).verdict, strict=args.strict)
    except StorageError:
        print(render_text(checked.verdict))  # what was found must not be lost with the disk
        raise


def _expectations(args: argparse.Namespace, config: Config | None) -> Expectations:
    """An option wins over the config, the config over the defaults."""
    given = {
        "nodes": args.nodes,
        "gpus": args.expect_gpus,
        "tier": args.tier,
        "min_free_disk_gb": args.min_free_disk_gb,
        "min_shm_mb": args.min_shm_mb,
    }
    base = {}
    if config:
        base = {
            "nodes": config.cluster.nodes,
            "gpus": config.cluster.gpus_per_node,
            "tier": config.preflight.tier,
            "min_free_disk_gb": config.preflight.min_free_disk_gb,
            "min_shm_mb": config.preflight.min_shm_mb,
        }
    elif args.nodes is None:
        base = {"nodes": len(allocation_nodes())}
    return Expectations(**{**base, **{k: v for k, v in given.items() if v is not None}})


def _local_paths(config: Config) -> Sequence[str]:
    """Files that every node must read: the config's entries that are written as paths."""
    entries = (config.model.source, config.data.train, config.data.heldout)
    return [entry for entry in dict.fromkeys(entries) if _is_path(entry)]


def _is_path(entry: str) -> bool:
    return entry.startswith((".", "/")) or Path(entry).exists()
