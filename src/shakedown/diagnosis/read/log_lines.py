"""Lines of logs that mean something.

A row of `PATTERNS` is one kind of line; a test holds a real example of each.
"""

import re
from typing import Any

from shakedown.diagnosis.records import LogKind, clean

_Detail = dict[str, Any]
# Names that may be all digits and stay names.
_TEXT = frozenset("guid desc type node node_b peer call_a call_b op how bus what container".split())


def groups_of(match: re.Match[str]) -> _Detail:
    """Named groups; digits become numbers, lists of ranks become lists."""
    detail: _Detail = {}
    for key, value in match.groupdict().items():
        if value is None:
            continue
        if key == "ranks":
            detail[key] = [int(n) for n in re.findall(r"\d{1,7}", value)][:10_000]
        else:
            detail[key] = clean(value, 120) if key in _TEXT else int(value)
    return detail


# Kind, lower-case words of which a line that matches has at least one, pattern.
Row = tuple[LogKind, tuple[str, ...], re.Pattern[str]]
# Most repetitions have an upper bound: a crafted line must not make a pattern backtrack for long,
# nor a number be too long for int(). Wording differs between versions of torch, so parts that only
# some of them write are optional.
PATTERNS: list[Row] = [
    # gloo: a message of another size than the receiver posted; the process aborts
    (
        "size_mismatch",
        ("op.preamble.length",),
        re.compile(
            r"op\.preamble\.length <= op\.nbytes\. (?P<received>\d{1,15}) vs (?P<expected>\d{1,15})"
        ),
    ),
    # TORCH_DISTRIBUTED_DEBUG=DETAIL
    (
        "collective_mismatch",
        ("detected mismatch between collectives",),
        re.compile(
            r"Detected mismatch between collectives on ranks\. Rank (?P<rank_a>\d{1,7}) is running"
            r" collective: (?P<call_a>.{1,700}?),? but Rank (?P<rank_b>\d{1,7}) is running"
            r" collective: (?P<call_b>.{1,700})"
        ),
    ),
    # torch's own comparisons of what ranks hold: of parameters, of modules, of arguments
    (
        "collective_mismatch",
        ("disagree", "inconsistent", "not match", "mismatch", "must be the same", "expects same"),
        re.compile(
            r"^(?:\w+(?:Error|Exception): ).{0,80}?"
            r"(?:disagree\w*|inconsistent|not match|mismatch|must be the same|expects same)"
            r".{0,120}?(?:\branks?\b|\brank\d|all process|in process \d|across (?:all )?devices)"
        ),
    ),
    # What a rank writes that ends itself because others let it down, or its GPU does not answer
    (
        "gave_up",
        (
            "heartbeat monitor timed out",
            "watchdog got stuck",
            "taking the entire process down",
            "watchdog thread terminated",
        ),
        re.compile(
            r"Heartbeat monitor timed out|watchdog got stuck for \d{1,9}"
            r"|taking the entire process down|watchdog thread terminated with exception"
        ),
    ),
    (
        "timeout",
        ("watchdog caught collective",),
        re.compile(
            # Before torch 1.13 the line has no number, before 2.1 no counts of elements.
            r"Watchdog caught collective operation timeout: WorkNCCL\("
            # A line that breaks off in the middle of a word names no operation.
            r"(?:SeqNum=(?P<seq>\d{1,15}), )?OpType=(?P<op>\w{1,40})(?=[,)])"
            r"(?:, NumelIn=(?P<numel_in>\d{1,18}), NumelOut=(?P<numel_out>\d{1,18}))?"
        ),
    ),
    (
        "timeout",
        ("ast enqueued",),
        re.compile(
            # `[PG 0 Rank 5] ...` or `[PG ID 0 PG GUID 0(default_pg) Rank 5] ...`. This rank counts
            # within the group: it is not used as the rank of the job.
            r"\[PG (?:ID )?(?P<pg>\d{1,6})(?: PG GUID (?P<guid>[^() \]]{1,80}))?"
            r" ?(?:\((?P<desc>[^)]{0,80})\))? Rank (?P<group_rank>\d{1,7})\].{0,200}?"
            r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>\d{1,20}),"
            r".{0,40}?[Ll]ast completed (?:NCCL )?work: (?P<completed>\d{1,20})"
        ),
    ),
    # TORCH_NCCL_DESYNC_DEBUG=1
    (
        "missing_ranks",
        ("finished collective",),
        re.compile(
            r"^\s*(?:- )?\[(?P<ranks>[\d, ]{1,400})\] finished collective #\d+,.*but didn't join"
        ),
    ),
    (
        "missing_ranks",
        ("finish collective",),
        re.compile(r"- \[(?P<ranks>[\d, ]{1,400})\] joined but didn't finish collective"),
    ),
    (
        "missing_ranks",
        ("lagging ranks",),
        re.compile(r"ranks \[(?P<ranks>[\d, ]{1,400})\] are the lagging ranks that caused"),
    ),
    # monitored_barrier(wait_all_ranks=True) and its one-rank form
    (
        "missing_ranks",
        ("failed to pass monitoredbarrier",),
        # Rank 0 alone waits for the others there, and may say of itself that it is not through.
        re.compile(
            r"Ranks? (?!0 failed)(?P<ranks>\d[\d, ]{0,400}) failed to pass monitoredBarrier"
        ),
    ),
    (
        "missing_ranks",
        # DistStoreError: `Timed out after 61 seconds waiting for clients. 3/4 clients joined.`
        ("clients joined",),
        re.compile(r"(?P<joined>\d{1,6})/(?P<world>\d{1,6}) clients joined"),
    ),
    # init_process_group, Lightning; torch 1.x and 2.x
    (
        "missing_ranks",
        ("store based barrier",),
        re.compile(
            r"store based barrier .{0,60}?rank: (?P<waits>\d{1,6}), .{0,120}?"
            r"world_size=(?P<world>\d{1,6}), "
            r"(?:num_workers_joined|worker_count)=(?P<joined>\d{1,6})"
        ),
    ),
    (
        "peer_closed",
        (
            "closed by peer",
            "reset by peer",
            "socket closed",
            "broken pipe",
            "remote process",
            "ncclremote",
        ),
        re.compile(
            r"Connection closed by peer|Connection reset by peer|Socket closed|Broken pipe"
            r"|remote process (?:has )?(?:exited|died)|ncclRemoteError"
        ),
    ),
    (
        "abort",
        ("terminate called",),
        re.compile(r"^terminate called after throwing an instance of '(?P<type>[^']{1,100})'"),
    ),
    ("abort", ("fatal python error",), re.compile(r"^Fatal Python error: (?P<type>.{1,100})")),
    # torch, the kernel (`dmesg`), Slurm. A handful of kernel lines tell of one kill.
    (
        "oom",
        (
            "out of memory",
            "outofmemoryerror",
            "oom-kill",
            "oom_kill",
            "can't allocate memory",
            "oomkilled",
        ),
        re.compile(
            # A size of 1 EB is no want of memory: what was to be held is damaged.
            r"(?!.*more than 1EB memory)"
            r"(?:CUDA out of memory|OutOfMemoryError"
            r"|[Oo]ut of memory: Killed process (?P<pid>\d{1,8})"
            r"|oom-kill:.{0,300}pid=(?P<pid_b>\d{1,8})|oom[-_]kill event|OOM Killed"
            r"|\b(?P<container>OOMKilled)\b|Cuda failure .{0,12}out of memory"
            r"|DefaultCPUAllocator: can't allocate memory)"
        ),
    ),
    # torch's and NCCL's words, and the driver's in the kernel log
    (
        "gpu_error",
        (
            "cuda error",
            "hip error",
            "musa error",
            "cuda_error",
            "xid (pci",
            "uncorrectable",
            "fallen off the bus",
            "an illegal ",
        ),
        re.compile(
            r"\b(?:CUDA|HIP|MUSA) error: (?!out of memory|invalid device ordinal)\w.{0,100}"
            r"|CUDA_ERROR_(?!OUT_OF_MEMORY)[A-Z_]{3,60}"
            # Xid 45 and 154 follow from another error: NVIDIA's table of Xids.
            r"|Xid \(PCI:(?P<bus>[\w:.]{4,20})\): (?!45,|154,)\d{1,4}(?:, pid='?(?P<pid>\d{1,8}))?"
            r"|[Uu]ncorrectable (?:ECC|NVLink) error|fallen off the bus"
            r"|an illegal (?:memory access|instruction) was encountered"
        ),
    ),
    (
        "cancelled",
        ("cancelled at",),
        re.compile(r"CANCELLED AT \S{1,40} DUE TO (?:TIME LIMIT|PREEMPTION|JOB REQUEUE)"),
    ),
    # verl, NeMo RL, vLLM with Ray, Ray's autoscaler
    (
        "too_few_gpus",
        ("available", "resource request", "resource demand"),
        re.compile(
            r"[Rr]equested \d{1,6} GPUs, but only \d{1,6} are available"
            r"|[Tt]otal available GPUs \d{1,6}(?:\.0)? is less than total desired GPUs"
            r"|number of required GPUs exceeds the total number of available GPUs"
            r"|No available node types can fulfill resource request"
            r"|cannot provide a placement group .{0,80}since not enough resources are available"
        ),
    ),
    # tqdm, with a name
    (
        "progress",
        ("%|",),
        re.compile(r"^\W{0,10}(?P<what>[A-Z][\w ./()=,-]{2,80}?):\s{1,4}(?P<percent>\d{1,3})%\|"),
    ),
    # torchrun, srun, Slurm
    (
        "exit",
        ("failed (exitcode",),
        re.compile(
            r"failed \(exitcode: (?P<code>-?\d{1,4})\) local_rank: (?P<local_rank>\d{1,4})"
            r" \(pid: (?P<pid>\d{1,8})\)"
        ),
    ),
    (
        "exit",
        ("srun: error",),
        re.compile(
            r"^srun: error: (?P<node>\S{1,80}): task(?: (?P<task>\d{1,6})|s [\d,-]{1,400}): "
            r"(?P<how>Killed|Exited with exit code \d+|Aborted|Segmentation fault|Out Of Memory)"
        ),
    ),
    (
        "finished",
        ("successfully finished", "exits successfully", "'train_runtime'", "training finished!"),
        # torchrun, DeepSpeed, the Trainer of transformers, prime-rl
        re.compile(
            r"worker group successfully finished|Process \d{1,8} exits successfully"
            r"|^\{'train_runtime': |\b[Tt]raining finished!"
        ),
    ),
    # DeepSpeed's launcher, after the whole command
    ("exit", ("return code =",), re.compile(r"exits with return code = (?P<code>-?[1-9]\d{0,3})")),
    # Composer's launcher, and others in these words
    (
        "exit",
        ("with exit code", "with signal", "with code"),
        re.compile(
            r"\b[Rr]ank (?P<task>\d{1,6}) (?:crashed|failed|died|exited|terminated) with "
            r"(?:exit )?(?:code|signal) (?P<code>-?\d{1,4})\b"
        ),
    ),
    # a batch script's shell: `train.sh: line 12: 4711 Killed  RANK=3 python train.py`
    (
        "exit",
        ("killed", "segmentation fault", "bus error"),
        re.compile(
            r"line \d{1,6}: +(?P<pid>\d{1,8}) (?P<how>Killed|Segmentation fault|Bus error)\b"
            r"(?: +(?:\w+=\S* +){0,20}?RANK=(?P<task>\d{1,6})\b)?"
        ),
    ),
    # Ray's actors of verl: `name: YGp0dwWorkerDict_0:6`, of the first node the sixth
    (
        "exit",
        ("workerdict_0:",),
        # A tab: in `ray list actors`, of which most live, it is a space.
        re.compile(r"^\t+name: \w{0,40}WorkerDict_0:(?P<actor>\d{1,6})\s*$"),
    ),
    # Open MPI, twice
    (
        "exit",
        ("mpirun noticed", "orterun noticed"),
        re.compile(
            r"noticed that process rank (?P<task>\d{1,6}) with PID (?P<pid>\d{1,8}) on node "
            r"(?P<node>\S{1,80}) exited on signal (?P<signal>\d{1,2})"
        ),
    ),
    (
        "exit",
        ("process name: [[",),
        re.compile(r"Process name: \[\[\d{1,8},\d{1,6}\],(?P<task>\d{1,6})\]"),
    ),
    (
        "node",
        ("node failure", "node_fail", "error: node"),
        re.compile(
            r"NODE FAILURE|NODE_FAIL|Node failure on (?P<node>[^\s,]{1,80})"
            r"|error: Node (?P<node_b>\S{1,80}) (?:has failed|not responding)"
        ),
    ),
    # ssh, pdsh: a refused connection would come from a node that lives
    (
        "node",
        ("no route to host", "host is down", "connection timed out", "connect failed"),
        re.compile(
            r"ssh: connect to host (?P<node>\S{1,80}) port \d{1,5}: "
            r"(?:No route to host|Host is down|Connection timed out)"
            r"|^pdsh@\S{1,80}: (?P<node_b>[\w.-]{1,80}): "
            r"(?:mcmd: )?connect(?:ion)? (?:failed|timed out)"
        ),
    ),
    (
        "storage",
        (
            "stale file",
            "input/output",
            "transport endpoint",
            "no space left",
            "quota exceeded",
            "not responding",
            "evicted",
            "blocked for more than",
            "remote data host",
        ),
        re.compile(
            r"Stale file handle|Input/output error|Transport endpoint is not connected"
            r"|No space left on device|Disk quota exceeded"
            # the kernel: of NFS, of Lustre, and of any task in its uninterruptible sleep
            r"|nfs: server \S{1,80} not responding|LustreError: .{0,200}evicted"
            r"|This client was evicted by|INFO: task \S{1,40} blocked for more than"
            # Hugging Face datasets, of a stream
            r"|Got disconnected from remote data host"
        ),
    ),
    (
        "nccl_error",
        (
            "ncclinternal",
            "ncclsystem",
            "unhandled system error",
            "nccl warn",
            "ncclsocket",
        ),
        re.compile(
            r"ncclInternalError|ncclSystemError|unhandled system error|^ncclSocket\w{1,40}: "
            r"|(?:(?P<node>[\w.-]{1,80}):\d{1,8}:\d{1,8} \[\d{1,3}\] .{0,60}?)?"
            # A plug-in that cannot be used is no error: NCCL goes on with another network.
            r"NCCL WARN (?!.{0,120}initialization failed)"
            r"(?=.{0,80}?(?:Got completion|ibv_|IB |Net |NET/|timed out|[Ss]ocket))"
            r"(?=.{0,400}?(?i:error|status|fail|timed out|closed|refused|unreachable|no route"
            r"|async event))(?:.{0,80}?(?:from peer|[Cc]onnect to) (?P<peer>[^\s<]{1,80}))?"
        ),
    ),
    (
        "too_slow",
        ("timed out after", "timeout after", "exceeded the time"),
        re.compile(
            # torch.distributed.elastic.agent is torchrun's
            r"(?<!elastic[/.])"
            r"(?P<what>\b(?:rollout|episode|agent|reward|judge|verifier|grader)\w{0,40}).{0,120}?"
            r"(?:tim(?:ed|e) ?out after|exceeded the time)",
            re.I,
        ),
    ),
    (
        "starving",
        ("waiting for",),
        re.compile(
            r"[Ww]aiting for (?:(?:the )?(?:training|next|rollout) batch(?! from \w*iter_)"
            r"|rollouts?\b)"
        ),
    ),
    (
        "waiting_weights",
        ("waiting for",),
        re.compile(r"[Ww]aiting for (?:policy |new |updated )?(?:weights?|checkpoint)\b.{0,80}"),
    ),
    (
        "staleness",
        ("staleness", "off-policy", "off policy", "capacity"),
        re.compile(
            r"(?:staleness|off[- ]policy).{0,60}(?:capacity|limit|exceeded|paus|block)"
            r"|no (?:rollout )?capacity",
            re.I,
        ),
    ),
    (
        "server_unhealthy",
        (
            "engine",
            "health",
            "unreachable",
            "did not answer",
            "connect",
            "rpc call to",
            "no_available_workers",
            "circuits open",
        ),
        re.compile(
            r"EngineDeadError|\bengine is dead\b|EngineCore .{0,60}(?:died|failed)"
            r"|RPC call to \w{1,60} timed out"
            r"|no_available_workers|all circuits open"
            r"|health ?check .{0,40}(?:failed|timed out)"
            r"|(?:inference )?server .{0,60}(?:unhealthy|not healthy|unreachable|did not answer)"
            r"|(?:httpx\.|openai\.)?(?:ConnectError|APIConnectionError|ConnectTimeout)"
            r"|ClientConnectorError|ServerDisconnectedError"
            r"|Connection refused",
            re.I | re.A,  # else `ı` is an `i`, which the words above do not know
        ),
    ),
]
