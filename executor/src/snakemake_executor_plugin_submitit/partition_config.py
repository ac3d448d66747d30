"""Print a file of Slurm's partitions: `submitit-partition-config > partitions.yaml`.

It asks `scontrol show partition` and `sinfo`, and prints the file that `partitions` reads.
Omissions and entries to check are reported on stderr. Exit: 0 printed, 2 Slurm cannot be asked or
has none.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from snakemake_executor_plugin_submitit.slurm import SlurmError, run

# Partition, CPUs, MB, gres, features.
_NODE_FORMAT = "%R|%c|%m|%G|%f"
_NODE = re.compile(r"([^|]+)\|([0-9]{1,9})\|([0-9]{1,9})\|([^|]*)\|([^|]*)")
# gpu:4, gpu:a100:4(S:0-1), gpu:1g.5gb:7
_GPU = re.compile(r"(?:^|,)gpu(?::([^:,()]+))?:([0-9]{1,9})(?![^,(])")
_OPEN = {"State": "UP", "RootOnly": "NO", "ReqResv": "NO"}
_FREE = dict.fromkeys(("AllowAccounts", "AllowGroups", "AllowQos"), "ALL")
_HEADER = """\
# Generated from Slurm; please review. max_gpu is that of the largest node: raise it for jobs on
# several nodes. Delete partitions that no job should use.
"""


class PartitionNode(NamedTuple):
    """A node of one partition, in sinfo's words."""

    partition: str
    cpus: int
    memory_mb: int
    gres: str
    features: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the file."""
    parser = argparse.ArgumentParser(
        "submitit-partition-config", description="Print a file for --submitit-partition-config."
    )
    parser.add_argument(
        "cluster", nargs="?", help="cluster, if the database has several (default: this host's)"
    )
    try:
        found, notes = _ask(parser.parse_args(arguments).cluster)
    except SlurmError as error:
        print(f"no partitions: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(_HEADER + yaml.safe_dump({"partitions": found}, sort_keys=False), end="")
    print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
    return 0


def _ask(cluster: str | None) -> tuple[dict[str, dict[str, Any]], list[str]]:
    at = ["--clusters", cluster] if cluster else []
    partitions = run(["scontrol", *at, "show", "partition"])
    nodes = run(["sinfo", *at, "--noheader", "--Node", "--format", _NODE_FORMAT])
    found, notes = config(partitions, nodes)
    if not found:
        raise SlurmError("; ".join(["Slurm has none that takes jobs", *notes]))
    there = {"cluster": cluster} if cluster else {}
    return {name: {**limits, **there} for name, limits in found.items()}, notes


def config(partitions: str, nodes: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The partitions that accept jobs, with their keys in the file, and notes for the user.

    Args:
        partitions: the output of `scontrol show partition`.
        nodes: sinfo's lines of `_NODE_FORMAT`.
    """
    found, notes, every = {}, [], parse_nodes(nodes)
    for facts in parse_partitions(partitions):
        name = facts["PartitionName"]
        own = [node for node in every if node.partition == name]
        closed = _other_than(_OPEN, facts) or ("" if own else "sinfo shows no node of it")
        some = _other_than(_FREE, facts)
        if closed:
            notes.append(f"{name} is left out: {closed}")
        else:
            found[name] = limits(facts, own)
            notes += [f"{name} is not for everyone: {some}"] if some else []
    return found, notes


def _other_than(usual: Mapping[str, str], facts: Mapping[str, str]) -> str:
    found = {name: facts.get(name, value) for name, value in usual.items()}
    return " ".join(f"{name}={value}" for name, value in found.items() if value != usual[name])


def parse_partitions(text: str) -> list[dict[str, str]]:
    """scontrol's fields of each partition, the default one first, as it wins among equals."""
    parts = re.split(r"^(?=PartitionName=\S)", text, flags=re.MULTILINE)[1:]
    found = [dict(re.findall(r"(\S+?)=(\S*)", part)) for part in parts]
    return sorted(found, key=lambda facts: facts.get("Default") != "YES")


def parse_nodes(text: str) -> list[PartitionNode]:
    """sinfo's lines of `_NODE_FORMAT`; other lines, such as a cluster's name, are none."""
    rows = [match.groups() for line in text.splitlines() if (match := _NODE.fullmatch(line))]
    return [
        PartitionNode(name, int(cpus), int(memory), *words) for name, cpus, memory, *words in rows
    ]


def limits(facts: Mapping[str, str], nodes: Sequence[PartitionNode]) -> dict[str, Any]:
    """A partition's keys in the file, without those that Slurm does not limit or no node has."""
    gpus = [[(model, int(count)) for model, count in _GPU.findall(node.gres)] for node in nodes]
    models = {model for node in gpus for model, _ in node}
    features = {feature for node in nodes for feature in node.features.split(",")}
    keys = {
        "max_runtime": facts.get("MaxTime", "").replace("UNLIMITED", ""),
        "max_mem_mb": _capped([node.memory_mb for node in nodes], facts.get("MaxMemPerNode", "")),
        "max_threads": _capped([node.cpus for node in nodes], facts.get("MaxCPUsPerNode", "")),
        "max_nodes": _capped([len(nodes)], facts.get("MaxNodes", "")),
        "max_gpu": max(sum(count for _, count in node) for node in gpus),
        "available_gpu_models": [] if "" in models else sorted(models),
        "available_constraints": sorted(features - {"(null)", ""}),
    }
    return {key: value for key, value in keys.items() if value}


def _capped(numbers: Sequence[int], cap: str) -> int:
    """The largest, but not above the cap, which may be a word such as UNLIMITED."""
    most = max(numbers)
    return min(most, int(cap)) if re.fullmatch("[0-9]{1,9}", cap) else most


if __name__ == "__main__":
    sys.exit(main())
