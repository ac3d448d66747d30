"""A private cluster that counts the calls of Slurm's programs, and the official executor on it."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PEER = ("snakemake-executor-plugin-slurm==2.8.0", "snakemake-executor-plugin-slurm-jobstep==0.6.1")
PROGRAMS = ("sbatch", "squeue", "sacct", "sacctmgr", "scontrol", "scancel", "sinfo", "srun")
CLUSTER = Path(__file__).resolve().parents[1] / "scripts" / "slurm_cluster.py"

# One appended line is one write, so that parallel calls do not mix. The official jobstep drops
# SLURM_CONF in front of its nested srun; without it no private cluster is found.
WRAPPER = """#!/bin/sh
if [ -n "$SLURM_JOB_ID" ]; then where=job; else where=client; fi
echo "$where {program}" >> {log}
export SLURM_CONF="${{SLURM_CONF:-{slurm_conf}}}"
exec {real} "$@"
"""

# Snakemake imports every executor that it finds: the peer's runs must not pay for ours.
SITECUSTOMIZE = """
import pkgutil
_every = pkgutil.iter_modules
def iter_modules(*args, **kwargs):
    own = "snakemake_executor_plugin_submitit"
    return (module for module in _every(*args, **kwargs) if module.name != own)
pkgutil.iter_modules = iter_modules
"""


@dataclass(frozen=True)
class Cluster:
    """The private cluster: its configuration, and the folder and log of the wrappers."""

    slurm_conf: Path
    wrappers: Path
    log: Path


def install_peer(folder: Path) -> Path:
    """The official executor and its jobstep, without what Snakemake already brought."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", os.fspath(folder), *PEER], check=True)
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    return folder


@contextmanager
def private_cluster(folder: Path, nodes: int, cpus: int) -> Iterator[Cluster]:
    """A cluster with accounting, for as long as the block runs."""
    home = folder / "slurm"
    size = ["--nodes", str(nodes), "--cpus", str(cpus), "--accounting", "db"]
    command = [sys.executable, os.fspath(CLUSTER)]
    subprocess.run(
        [*command, "start", os.fspath(home), *size], check=True, stdout=subprocess.DEVNULL
    )
    try:
        cluster = Cluster(home / "etc" / "slurm.conf", folder / "bin", folder / "calls.log")
        write_wrappers(cluster)
        yield cluster
    finally:
        subprocess.run([*command, "stop", os.fspath(home)], check=True)


def write_wrappers(cluster: Cluster) -> None:
    """A counting stand-in for each Slurm program."""
    cluster.wrappers.mkdir()
    for program in PROGRAMS:
        text = WRAPPER.format(
            program=program,
            log=cluster.log,
            slurm_conf=cluster.slurm_conf,
            real=shutil.which(program),
        )
        path = cluster.wrappers / program
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)


def environment(cluster: Cluster, peer: Path | None) -> dict[str, str]:
    """Slurm's wrappers first; the peer only where it is given."""
    # Bytecode is kept, as in any user's shell; else each job compiles what pip did not install.
    dropped = ("SLURM_", "SNAKEMAKE_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    programs = [os.fspath(cluster.wrappers), os.fspath(Path(sys.executable).parent)]
    variables["PATH"] = os.pathsep.join([*programs, variables.get("PATH", os.defpath)])
    variables["SLURM_CONF"] = os.fspath(cluster.slurm_conf)
    return variables if peer is None else {**variables, "PYTHONPATH": os.fspath(peer)}


def surroundings() -> dict[str, object]:
    """What the figures depend on."""
    packages = ["snakemake", "submitit", "snakemake-interface-executor-plugins"]
    slurm = subprocess.run([real("slurmctld"), "-V"], capture_output=True, text=True, check=True)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "versions": {
            "python": platform.python_version(),
            "slurm": slurm.stdout.split()[-1],
            "peer": list(PEER),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }


def real(program: str) -> str:
    """The program itself; a user's PATH often lacks the daemons' folders."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
    return shutil.which(program, path=path) or program
