"""Pure rules over one node's facts: one row in RULES and one small function each."""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shakedown.core.verdict import Blame, FindingStatus
from shakedown.preflight.model import Expectations, Facts

MIN_NOFILE = 4096  # 512 episodes at once hold about 2 descriptors each, twice over
MIN_NPROC = 4096
MIN_MEMLOCK_MB = 16 * 1024  # AWS's health check warns below 16 GiB: RDMA pins its buffers
MIN_FREE_MEMORY = 0.1  # share of main memory


@dataclass(frozen=True)
class RuleResult:
    """A rule's answer, which judge.py turns into a Finding."""

    status: FindingStatus
    measured: Any = None
    expected: Any = None
    unit: str = ""
    blame: Blame = "node"
    remedy: str = ""


Rule = Callable[[Facts, Expectations], RuleResult]


def memory(facts: Facts, want: Expectations) -> RuleResult:  # noqa: ARG001
    """Warn when little is available: someone else's processes are left on the node."""
    total = facts["limit_mb"] or facts["total_mb"]
    # The kernel counts what is available on the machine, whatever the control group allows.
    free = min(facts["available_mb"], total)
    least = round(total * MIN_FREE_MEMORY)
    if free < least:
        return RuleResult("warn", free, f">= {least}", "MB", "node", "look for left-over processes")
    return RuleResult("pass", free, f">= {least}", "MB")


def shm(facts: Facts, want: Expectations) -> RuleResult:
    """Too little shared memory: bus errors in data loaders, vLLM and NCCL."""
    expected = f">= {want.min_shm_mb:g}"
    if facts["free_mb"] < want.min_shm_mb:
        remedy = "mount /dev/shm larger (containers: --shm-size), or remove stale files there"
        return RuleResult("fail", facts["free_mb"], expected, "MB free", "node", remedy)
    return RuleResult("pass", facts["free_mb"], expected, "MB free")


def limits(facts: Facts, want: Expectations) -> RuleResult:
    """Open files and processes; locked memory where there are GPUs, for RDMA."""
    low = []
    for name, least in (("nofile", MIN_NOFILE), ("nproc", MIN_NPROC)):
        soft = facts[name][0]
        if soft is not None and soft < least:
            low.append((name, soft, least))
    memlock = facts["memlock_mb"][0]
    if want.gpus and memlock is not None and memlock < MIN_MEMLOCK_MB:
        low.append(("memlock_mb", memlock, MIN_MEMLOCK_MB))
    if not low:
        return RuleResult(
            "pass", {name: facts[name][0] for name in ("nofile", "nproc", "memlock_mb")}
        )
    # 1024 is the usual default of Linux.
    severe = any(name == "nofile" and soft < 1024 for name, soft, _ in low)
    return RuleResult(
        "fail" if severe else "warn",
        {name: soft for name, soft, _ in low},
        {name: f">= {least}" for name, _, least in low},
        remedy="raise the soft limit (ulimit) in the job, or the node's limits for Slurm's jobs",
    )


def files(facts: Facts, want: Expectations) -> RuleResult:
    """The results folder must take a file, keep it, and have room."""
    expected = f">= {want.min_free_disk_gb:g}"
    failed = facts.get("failed")
    if failed:
        return RuleResult(
            "fail",
            f"{failed['step']}: {failed['errno']} {failed['message']}",
            "write, fsync, rename, list, read, remove",
            remedy=f"look at {facts['folder']} on this node: df -h, df -i, quota, mount",
        )
    if facts["free_gb"] < want.min_free_disk_gb:
        remedy = f"free space under {facts['folder']}"
        return RuleResult("fail", facts["free_gb"], expected, "GB free", "environment", remedy)
    # File systems without a fixed number of inodes, such as btrfs, report 0.
    if facts["free_files"] is not None and 0 < facts["free_files"] < 10_000:
        return RuleResult("warn", facts["free_files"], ">= 10000", "free inodes", "environment")
    return RuleResult("pass", facts["free_gb"], expected, "GB free")


def names(facts: Facts, want: Expectations) -> RuleResult:  # noqa: ARG001
    """gloo and NCCL listen where the host's name points: it must point at this host."""
    measured, own = facts["addresses"], _own_addresses(facts)
    expected = f"{facts['hostname']} resolves to an address of this node"
    if not measured:
        why = facts["error"] or "no address"
        return RuleResult(
            "fail", why, expected, remedy=f"add {facts['hostname']} to DNS or /etc/hosts"
        )
    # A scope may follow the address: fe80::1%eth0.
    if any(ipaddress.ip_address(a.partition("%")[0]).is_link_local for a in measured):
        remedy = "it is the wrong interface; fix DNS or set GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
        return RuleResult("fail", measured, expected, remedy=remedy)
    # Of this node's own addresses only IPv4 is known (checks/network.py).
    foreign = [a for a in measured if ":" not in a and a not in own and not _is_loopback(a)]
    if foreign and len(foreign) == len(measured):
        return RuleResult("fail", measured, f"one of {sorted(own)}", remedy="fix DNS or /etc/hosts")
    if facts["unresolved"]:
        remedy = "add the nodes to DNS, or NodeAddr to slurm.conf"
        return RuleResult(
            "fail", facts["unresolved"], "all nodes resolve", "", "environment", remedy
        )
    return RuleResult("pass", measured, expected)


def _own_addresses(facts: Facts) -> set[str]:
    return {address for group in facts["interfaces"].values() for address in group}


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def ports(facts: Facts, want: Expectations) -> RuleResult:  # noqa: ARG001
    """The requested ports, and some port at all, must be free."""
    first, last = facts["range"]
    if facts["taken"]:
        remedy = "end what listens there (ss -ltnp) or choose other ports"
        return RuleResult("fail", facts["taken"], "free", "", "node", remedy)
    if not facts["free"]:
        remedy = "something holds the whole range: ss -ltnp"
        return RuleResult("fail", f"none free in {first}-{last}", "a free port", "", "node", remedy)
    return RuleResult("pass", facts["free"][:3], "free")


def gpus(facts: Facts, want: Expectations) -> RuleResult:
    """As many usable GPUs as expected, none lost. 0 is right when 0 are expected."""
    count, expected = facts["count"], f">= {want.gpus}"
    if facts["lost"]:
        remedy = "a GPU fell off the bus: drain the node; see XID errors in dmesg"
        return RuleResult("fail", f"lost: {'; '.join(facts['lost'])}", "none lost", remedy=remedy)
    if count < want.gpus:
        hidden = facts.get("installed", count) >= want.gpus
        remedy = "request them: --gres=gpu:N or --gpus-per-node; see CUDA_VISIBLE_DEVICES"
        return RuleResult("fail", count, expected, "GPUs", "user" if hidden else "node", remedy)
    for gpu in facts.get("gpus", []):
        wrong = _gpu_fault(gpu)
        if wrong is not None:
            return RuleResult(
                "fail", f"GPU {gpu['index']}: {wrong}", "healthy", "", "node", "drain"
            )
    busy = [g["index"] for g in facts.get("gpus", []) if _used_share(g) > 0.1]
    if busy and want.gpus:
        return RuleResult(
            "warn", busy, "no memory in use", "GPU", "node", "nvidia-smi shows by whom"
        )
    return RuleResult("pass", f"{count} ({facts['source']})", expected, "GPUs")


def _gpu_fault(gpu: Facts) -> str | None:
    if (gpu["ecc.errors.uncorrected.volatile.total"] or "0") != "0":
        return "uncorrected memory errors"
    if gpu["clocks_throttle_reasons.hw_slowdown"] == "Active":
        return "hardware slowdown"
    return None


def _used_share(gpu: Facts) -> float:
    total, used = gpu["memory.total"], gpu["memory.used"]
    return float(used) / float(total) if total and used else 0.0


def paths(facts: Facts, want: Expectations) -> RuleResult:  # noqa: ARG001
    """Model and data files can be read."""
    if not facts["paths"]:
        return RuleResult("skip", expected="no paths were given", blame="none")
    broken = {path: row["error"] for path, row in facts["paths"].items() if "error" in row}
    if broken:
        remedy = "put the files where every node can read them"
        return RuleResult("fail", broken, "readable", "", "environment", remedy)
    read = {path: f"{row['files']} files, {row['bytes']} B" for path, row in facts["paths"].items()}
    return RuleResult("pass", read, "readable")


RULES: dict[str, Rule] = {
    "memory": memory,
    "shm": shm,
    "limits": limits,
    "files": files,
    "names": names,
    "ports": ports,
    "gpus": gpus,
    "paths": paths,
}
