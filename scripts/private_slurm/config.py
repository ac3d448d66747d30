"""The cluster's plan and the text of its configuration files. Pure: no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The controller's host name where nodes have networks of their own.
CONTROLLER = "ctl"
ACCOUNTING = ("db", "filetxt", "none")

# Slurm's default of MaxJobId.
HIGHEST_JOB_ID = 67_043_328
_JOB_ID_RANGE = 60_000_000


@dataclass(frozen=True)
class Plan:
    """One cluster. `memory_mb` and `cpus` are what each node claims to have, not what exists.

    `gpu_files`: device files that stand for each node's GPUs; empty means nodes without GPUs.
    `network`: the first three numbers of the nodes' own network, `10.77.3`, where each node has a
    network namespace, a host name and an address; empty where all share this machine's loopback.
    `settings`: further lines of slurm.conf; they outrank the cluster's own.
    """

    folder: Path
    hostname: str
    user: str
    controller_port: int
    database_port: int
    node_ports: Sequence[int]
    accounting: str
    first_job_id: int
    slurm_version: tuple[int, int]
    cpus: int = 4
    memory_mb: int = 16000
    gpu_files: Sequence[str] = ()
    network: str = ""
    settings: Sequence[str] = ()

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, len(self.node_ports) + 1)]

    @property
    def name(self) -> str:
        return f"private{self.controller_port}"

    @property
    def hosts(self) -> Mapping[str, str]:
        """Host name -> address of the controller and the nodes."""
        names = [CONTROLLER, *self.nodes] if self.network else [self.hostname, *self.nodes]
        # .1 is this machine's own end, for clients.
        return {
            name: f"{self.network}.{number}" if self.network else "127.0.0.1"
            for number, name in enumerate(names, 2)
        }

    @property
    def controller(self) -> str:
        """The host name of the controller's machine."""
        return CONTROLLER if self.network else self.hostname

    def namespace(self, host: str) -> str:
        """The network namespace of a node or of the controller, as `ip netns` names it."""
        return f"{self.name}-{host}"

    @property
    def etc(self) -> Path:
        return self.folder / "etc"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge.sock"

    @property
    def mysql_socket(self) -> Path:
        return self.run / "mysql.sock"


def first_job_id(now: float) -> int:
    """A job id that an earlier cluster has not used: `now` in twentieths of a second, folded.

    Programs that name files by job id would otherwise read results of a cluster that is gone.
    """
    return 1 + int(now * 20) % _JOB_ID_RANGE


def render_slurm_conf(plan: Plan) -> str:
    """slurm.conf of the whole cluster."""
    lines = [*_identity(plan), *_behaviour(), *_accounting(plan), *_nodes(plan)]
    # Slurm takes the last of two lines of one name.
    lines += plan.settings
    return "\n".join(lines) + "\n"


def _identity(plan: Plan) -> list[str]:
    return [
        f"ClusterName={plan.name}",
        f"SlurmctldHost={plan.controller}({plan.hosts[plan.controller]})",
        f"SlurmUser={plan.user}",
        f"SlurmdUser={plan.user}",
        f"SlurmctldPort={plan.controller_port}",
        f"FirstJobId={plan.first_job_id}",
        "AuthType=auth/munge",
        # A requeued job waits until its old credential has expired: 10 s, not 120 s.
        f"AuthInfo=socket={plan.munge_socket},cred_expire=10",
        "CredType=cred/munge",
        # The default listens on every interface.
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        f"SlurmctldPidFile={plan.run}/slurmctld.pid",
        f"SlurmdPidFile={plan.run}/slurmd-%n.pid",
        f"StateSaveLocation={plan.folder}/state",
        f"SlurmdSpoolDir={plan.folder}/spool/%n",
        f"SlurmctldLogFile={plan.log}/slurmctld.log",
        f"SlurmdLogFile={plan.log}/slurmd-%n.log",
    ]


def _behaviour() -> list[str]:
    return [
        "SlurmctldDebug=info",
        "SlurmdDebug=info",
        # Nodes may claim more CPUs and memory than this machine has.
        "SlurmdParameters=config_overrides",
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=2",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "GresTypes=gpu",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "ReturnToService=2",
        "SlurmctldTimeout=10",
        "SlurmdTimeout=10",
        "InactiveLimit=0",
        "MinJobAge=300",
        "KillWait=5",
        "JobRequeue=1",
        "MaxArraySize=10001",
        "MaxJobCount=20000",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=5",
    ]


def _accounting(plan: Plan) -> list[str]:
    if plan.accounting == "db":
        return [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={plan.hosts[plan.controller]}",
            f"AccountingStoragePort={plan.database_port}",
            # AuthInfo alone leaves sacct and sacctmgr on the system's munge socket.
            f"AccountingStoragePass={plan.munge_socket}",
            "AccountingStorageTRES=gres/gpu",
        ]
    lines = ["AccountingStorageType=accounting_storage/none"]
    if plan.accounting == "filetxt":
        lines += ["JobCompType=jobcomp/filetxt", f"JobCompLoc={plan.log}/jobcomp.txt"]
    return lines


def _nodes(plan: Plan) -> list[str]:
    gres = f" Gres=gpu:{len(plan.gpu_files)}" if plan.gpu_files else ""
    lines = [
        f"NodeName={name} NodeHostname={name if plan.network else plan.hostname}"
        f" NodeAddr={plan.hosts[name]} Port={port}"
        f" CPUs={plan.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={plan.cpus}"
        f" ThreadsPerCore=1 RealMemory={plan.memory_mb}{gres} State=UNKNOWN"
        for name, port in zip(plan.nodes, plan.node_ports, strict=True)
    ]
    every = ",".join(plan.nodes)
    common = f"Nodes={every} MaxTime=INFINITE DefMemPerCPU=100 State=UP"
    # `high` preempts `main`: jobs of main are requeued.
    return [
        *lines,
        f"PartitionName=main {common} Default=YES PriorityTier=1",
        f"PartitionName=high {common} PriorityTier=10",
    ]


def render_gres_conf(plan: Plan) -> str:
    """gres.conf; File must name character or block devices or no GPU is handed out."""
    nodes = ",".join(plan.nodes)
    return "".join(f"NodeName={nodes} Name=gpu File={path}\n" for path in plan.gpu_files)


def render_cgroup_conf(plan: Plan) -> str:
    """cgroup.conf for a cluster that uses no cgroup at all."""
    if plan.slurm_version >= (23, 11):
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def render_slurmdbd_conf(plan: Plan) -> str:
    """slurmdbd.conf; its file must have mode 600."""
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={plan.munge_socket}",
            f"DbdHost={plan.controller if plan.network else 'localhost'}",
            f"DbdAddr={plan.hosts[plan.controller]}",
            f"DbdPort={plan.database_port}",
            f"SlurmUser={plan.user}",
            f"LogFile={plan.log}/slurmdbd.log",
            f"PidFile={plan.run}/slurmdbd.pid",
            "DebugLevel=info",
            "CommunicationParameters=NoInAddrAny",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            f"StorageUser={plan.user}",
            "StorageLoc=slurm_acct",
            "",
        ]
    )
