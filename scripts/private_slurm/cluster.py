"""Start, inspect and stop a private cluster that lives in one folder."""

import getpass
import json
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from private_slurm import config, networks, ports, processes
from private_slurm.config import ACCOUNTING, Plan
from private_slurm.daemons import SEARCH_PATH, Daemon, await_up, client, daemons, launch, log_end
from private_slurm.errors import USAGE, ClusterError
from private_slurm.processes import Process

_STATE = "cluster.json"
_PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
_DB_PROGRAMS = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb", "mariadb-install-db")
# A Unix socket's path holds 107 bytes, and slurmd puts its own below <folder>/spool/n1/.
_LONGEST_FOLDER = 70
# Character devices that every Linux has, for those who may not make their own.
_SPARE_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")


@dataclass(frozen=True)
class Cluster:
    """A started cluster: its plan and its daemons."""

    plan: Plan
    processes: Sequence[Process]

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs in its environment to talk to this cluster."""
        return {"SLURM_CONF": os.fspath(self.plan.slurm_conf)}


@dataclass(frozen=True)
class Health:
    """`alive` and `dead`: daemons by name; `nodes`: sinfo's lines (node, state, gres)."""

    alive: Sequence[str]
    dead: Sequence[str]
    nodes: Sequence[str]


def start(
    folder: Path,
    *,
    accounting: str = "db",
    nodes: int = 4,
    cpus: int = 4,
    memory_mb: int = 16000,
    base_port: int = 0,
    first_job_id: int = 0,
    own_networks: bool = False,
    settings: Sequence[str] = (),
) -> Cluster:
    """Start a cluster and wait until every node is idle.

    Args:
        folder: where all of it lives; empty, new, or a stopped cluster's.
        accounting: one of `ACCOUNTING`.
        nodes: slurmd daemons.
        cpus: what each node claims.
        memory_mb: what each node claims.
        base_port: first of 2 + nodes ports; 0 probes free ones.
        first_job_id: 0 takes one that no earlier cluster has used.
        own_networks: each node in a network namespace of its own (root alone may).
        settings: further lines of slurm.conf, `Name=value`.

    Raises:
        ClusterError: the request is wrong, a program is missing, or a daemon does not come up;
            what had been started is ended again.
    """
    folder = folder.resolve()
    _check_request(folder, accounting, nodes, cpus, memory_mb)
    _check_settings(first_job_id, settings)
    _check_programs(accounting)
    _clear(folder)
    version = _slurm_version()
    found = ports.choose(2 + nodes, base_port)
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        folder=folder,
        hostname=socket.gethostname().partition(".")[0],
        user=getpass.getuser(),
        controller_port=found[0],
        database_port=found[1],
        node_ports=found[2:],
        accounting=accounting,
        first_job_id=first_job_id or config.first_job_id(time.time()),
        slurm_version=version,
        cpus=cpus,
        memory_mb=memory_mb,
        gpu_files=_gpu_files(folder / "gpu"),
        network=networks.free_network() if own_networks else "",
        settings=list(settings),
    )
    return _start(plan)


def _start(plan: Plan) -> Cluster:
    started: list[Process] = []
    try:
        save(Cluster(plan, started))
        _write_files(plan)
        networks.create(plan)
        _bring_up(plan, started)
    except BaseException:
        _end_all(plan, started)
        raise
    return Cluster(plan, started)


def _check_request(folder: Path, accounting: str, nodes: int, cpus: int, memory_mb: int) -> None:
    problems = []
    if accounting not in ACCOUNTING:
        problems.append(f"accounting {accounting!r}: expected one of {', '.join(ACCOUNTING)}")
    if not 1 <= nodes <= 64:
        problems.append(f"nodes {nodes}: expected 1 to 64")
    if cpus < 1 or memory_mb < 1:
        problems.append(f"cpus {cpus}, memory {memory_mb} MB: expected at least 1")
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        problems.append(
            f"{folder}: longer than {_LONGEST_FOLDER} bytes, too long for Unix sockets below it"
        )
    if re.search(r"[\s,\[\]()#=%\"']", os.fspath(folder)):
        problems.append(f"{folder}: Slurm's configuration cannot hold this path's characters")
    if problems:
        raise ClusterError("\n".join(problems), exit_code=USAGE)


def _check_settings(first_job_id: int, settings: Sequence[str]) -> None:
    if not 0 <= first_job_id <= config.HIGHEST_JOB_ID:
        raise ClusterError(
            f"first job id {first_job_id}: expected 1 to {config.HIGHEST_JOB_ID}, or 0",
            exit_code=USAGE,
        )
    for line in settings:
        if not re.fullmatch(r"[A-Za-z]+=[^\s#]+", line):
            raise ClusterError(f"setting {line!r}: expected Name=value", exit_code=USAGE)


def _check_programs(accounting: str) -> None:
    wanted = _PROGRAMS + (_DB_PROGRAMS if accounting == "db" else ())
    missing = [name for name in wanted if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        raise ClusterError(f"not installed: {', '.join(missing)}; run scripts/install_system.sh")


def _clear(folder: Path) -> None:
    """Make room: an empty folder, or what a stopped cluster left behind.

    Raises:
        ClusterError: a cluster runs there, or the folder holds something else.
    """
    if (folder / _STATE).exists():
        old = load(folder)
        alive = [p.name for p in old.processes if processes.is_alive(p)]
        if alive:
            raise ClusterError(
                f"a cluster runs in {folder} ({', '.join(alive)}); stop it first",
                exit_code=USAGE,
            )
        for name in ("db", "etc", "gpu", "log", "run", "spool", "state"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / _STATE).unlink()
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ClusterError(
            f"{folder} is not an empty folder and not a stopped cluster", exit_code=USAGE
        )


def _slurm_version() -> tuple[int, int]:
    # The clients need a slurm.conf even for this; the controller does not.
    program = shutil.which("slurmctld", path=SEARCH_PATH) or "slurmctld"
    done = subprocess.run([program, "-V"], capture_output=True, text=True, check=False)
    found = re.search(r"(\d+)\.(\d+)", done.stdout)
    if found is None:
        answer = (done.stdout + done.stderr).strip()
        raise ClusterError(f"slurmctld -V answers {answer!r}, no version in it")
    return int(found[1]), int(found[2])


def _gpu_files(folder: Path) -> list[str]:
    """Four devices that stand for GPUs: own ones where mknod is allowed, else spare ones."""
    folder.mkdir(exist_ok=True)
    made = [folder / f"nvidia{index}" for index in range(4)]
    try:
        for path in made:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        return list(_SPARE_DEVICES)
    return [os.fspath(path) for path in made]


def _write_files(plan: Plan) -> None:
    for name in ("etc", "run", "log", "state", "db"):
        (plan.folder / name).mkdir(mode=0o755, exist_ok=True)
    for node in plan.nodes:
        (plan.folder / "spool" / node).mkdir(parents=True)
    key = plan.etc / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    plan.slurm_conf.write_text(config.render_slurm_conf(plan), encoding="utf-8")
    (plan.etc / "gres.conf").write_text(config.render_gres_conf(plan), encoding="utf-8")
    (plan.etc / "cgroup.conf").write_text(config.render_cgroup_conf(plan), encoding="utf-8")
    if plan.accounting == "db":
        dbd = plan.etc / "slurmdbd.conf"
        dbd.touch(mode=0o600)
        dbd.write_text(config.render_slurmdbd_conf(plan), encoding="utf-8")


def _bring_up(plan: Plan, started: list[Process]) -> None:
    """Start the daemons one after the other; the nodes' all at once."""
    if plan.accounting == "db":
        _make_database(plan)
    nodes: list[tuple[Daemon, Process]] = []
    for daemon in daemons(plan):
        process = launch(plan, daemon)
        started.append(process)
        save(Cluster(plan, started))
        if daemon.name.startswith("slurmd-"):
            nodes.append((daemon, process))
            continue
        await_up(plan, daemon, process)
        if daemon.name == "slurmdbd":
            _make_accounts(plan)
    for daemon, process in nodes:
        await_up(plan, daemon, process)
    _await_idle(plan)


def _make_database(plan: Plan) -> None:
    command = [
        "mariadb-install-db",
        "--no-defaults",
        f"--datadir={plan.folder}/db",
        f"--user={plan.user}",
        "--auth-root-authentication-method=socket",
        f"--auth-root-socket-user={plan.user}",
        "--skip-test-db",
    ]
    done = client(plan, *command, seconds=120.0)
    (plan.log / "mariadb-install-db.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        raise ClusterError("mariadb-install-db failed\n" + log_end(plan, "mariadb-install-db"))


def _make_accounts(plan: Plan) -> None:
    for entry in (
        ["cluster", plan.name],
        ["account", "main"],
        ["user", plan.user, "account=main"],
    ):
        done = client(plan, "sacctmgr", "-i", "add", *entry)
        # root exists already: sacctmgr then ends with 1 and says so.
        if done.returncode and "Nothing new added" not in done.stdout + done.stderr:
            raise ClusterError(f"sacctmgr add {' '.join(entry)}: {done.stderr or done.stdout}")


def _await_idle(plan: Plan) -> None:
    def idle() -> bool:
        done = client(plan, "sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N")
        return len(done.stdout.split()) == len(plan.nodes)

    if not processes.wait_until(idle, 30.0):
        seen = client(plan, "sinfo", "-N", "-o", "%N %T %E").stdout
        raise ClusterError(f"not every node is idle\n{seen}{log_end(plan, 'slurmctld')}")


def save(cluster: Cluster) -> None:
    """Write the plan and the processes into the cluster's state file."""
    body = {
        "plan": asdict(cluster.plan) | {"folder": os.fspath(cluster.plan.folder)},
        "processes": [asdict(process) for process in cluster.processes],
    }
    path = cluster.plan.folder / _STATE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def load(folder: Path) -> Cluster:
    """Read what `start` wrote.

    Raises:
        ClusterError: there is no cluster in `folder`, or its file is damaged.
    """
    path = folder.resolve() / _STATE
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        plan = body["plan"]
        plan["folder"] = Path(plan["folder"])
        plan["slurm_version"] = tuple(plan["slurm_version"])
        return Cluster(Plan(**plan), [Process(**row) for row in body["processes"]])
    except FileNotFoundError as error:
        raise ClusterError(f"no cluster in {folder}: {path} is missing", exit_code=USAGE) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{path} is damaged: {error}", exit_code=USAGE) from error


def status(folder: Path) -> Health:
    """Which daemons live and what the nodes do."""
    cluster = load(folder)
    alive = [p.name for p in cluster.processes if processes.is_alive(p)]
    dead = [p.name for p in cluster.processes if p.name not in alive]
    nodes: list[str] = []
    if "slurmctld" in alive:
        done = client(cluster.plan, "sinfo", "-h", "-N", "-p", "main", "-o", "%N %T %G")
        nodes = done.stdout.splitlines()
    return Health(alive, dead, nodes)


def stop(folder: Path) -> None:
    """End every process of the cluster, its jobs included, and prove that none is left.

    Raises:
        ClusterError: there is no cluster in `folder`, or a process outlived SIGKILL.
    """
    cluster = load(folder)
    _end_all(cluster.plan, cluster.processes)


def _end_all(plan: Plan, recorded: Sequence[Process]) -> None:
    """Nodes and controller first, then what they write to, then jobs that escaped their slurmd."""
    behind = ("slurmdbd", "mariadbd", "munged")
    groups = [[p for p in recorded if p.name not in behind]]
    groups += [[p for p in recorded if p.name == name] for name in behind]
    rest = [process for group in groups for process in processes.end(group)]
    rest += processes.end(processes.of_cluster(plan.folder, plan.name), seconds=3.0)
    networks.remove(plan)
    if rest:
        names = ", ".join(f"{process.name} (pid {process.pid})" for process in rest)
        raise ClusterError(f"still alive after SIGKILL: {names}")
