"""Whose a line of a log is, by what launchers, libraries and engines write before it."""

import re
from dataclasses import replace

from shakedown.diagnosis.read.numbers import pid_of
from shakedown.diagnosis.read.placements import ENGINE
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity

# kubectl logs --prefix and --timestamps, Ray, a node's name or a time before torchrun's own prefix
_OUTER = re.compile(
    r"^(?:\[pod/[^\]]{1,120}\] ?|\([^()]{1,80}\) |\[\d{4}-\d\d-\d\d[ T][\d:.,]{8,16}\] "
    r"|[\w.-]{1,60}: (?=\[(?:rank|default))"
    r"|\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:?\d\d) "
    r"|[\d/-]{8,10} [\d:.,]{8,16} (?:(?=\[(?:rank|default))|[\w.-]{1,60}: ))"
)
# torch's `[rank3]:` and torchrun's `[default1]:`, whose number is the rank within the node.
# With `--tee` of torch before 2.0 or torchx it is `[trainer3]:`, or `[trainer3|3]:`.
_PREFIX = re.compile(
    r"^\[(?:(?:rank|trainer)-?(\d{1,6})(?:\|\d{1,4})?|default-?(\d{1,4}))\]:? ?", re.I
)
# SGLang's own, of which TP counts the ranks of one server: `[2026-02-12 11:38:21 DP0 TP2 EP2] `;
# and vLLM's: `(Worker_TP2 pid=504) `, `(VllmWorker rank=2 pid=504) `
_OF_ENGINE = re.compile(
    r"^(?:\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: DP\d{1,4})? TP(?P<a>\d{1,4})(?: EP\d{1,4})?\] "
    r"|\((?:Worker_TP|VllmWorker rank=)(?P<b>\d{1,4}) pid=(?P<pid>\d{1,8})\) )"
)
# What a library writes into its line: `(PolicyWorker[rank=9] pid=4711) ...`, and torch's watchdog,
# whose number is the job's rank for the default group alone.
_RAY_RANK = re.compile(r"^\(\w{1,60}\[rank=(\d{1,6})\]")
# Ray's and vLLM's own: `(WorkerDict pid=4711, ip=10.0.0.7) `, `(Worker_TP1 pid=1390) `
_PROCESS = re.compile(
    r"^\((?P<title>[\w.:=\[\]-]{1,80}) pid=(?P<pid>\d{1,8})(?:, ip=(?P<ip>[\w.:-]{1,60}))?\) "
)
# NCCL's own: `host:pid:thread [gpu] `
NCCL_LINE = re.compile(r"^([\w.-]{1,80}):(\d{1,8}):\d{1,8} \[\d{1,3}\] ")
_SAYS_RANK = re.compile(r"\brank ?[=:] ?(\d{1,6})\b", re.I)
IN_LINE = re.compile(r"\[(?:PG (?:ID )?0 (?:PG GUID 0)?(?:\(default_pg\) )?)?Rank (\d{1,6})\] ")
# mpirun --tag-output: `[1,3]<stdout>: `, job and rank.
# Horovod: `[3]<stderr>:`
_MPI = re.compile(r"^\[(?:\d{1,4},)?(\d{1,6})\]<std(?:out|err)>: ?")
# A line that tqdm's bar stands before, as it ends without a line break.
_BEHIND_BAR = re.compile(r"%\|.{0,4000}?\](?=\[(?:rank|default)\d)")
_TASK = re.compile(r"^ *(\d{1,5}): ")  # srun --label


def _may_be_outer(text: str) -> bool:
    """Most lines have no prefix: a glance costs less than the pattern."""
    return text[:1] in "[(" or text[10:11] in ("T", " ") or "]:" in text[:200]


def strip(raw: str, named: Identity, *, tasks: bool = True) -> tuple[str, Identity, int | None]:
    """Remove `[default1]:[rank3]: ` or srun's `3: `; whose line it is, and its local rank.

    `tasks`: srun's tasks are ranks, see `starts_several`.
    """
    text = raw.rstrip("\r")
    if not text:
        return text, named, None
    if text[0] in "([" and (match := _OF_ENGINE.match(text)):
        pid = pid_of(int(match["pid"])) if match["pid"] else None
        who = Identity(int(match["a"] or match["b"]), pid, named.host, ENGINE)
        return text[match.end() :], who, None
    who = _worker(text, named) if text[0] == "(" else named
    text, rank, local = _without_outer(text), who.rank, None
    if match := _MPI.match(text):
        text, rank = text[match.end() :], int(match[1])
    found = False
    while match := _PREFIX.match(text):
        text, found = text[match.end() :], True
        rank = int(match[1]) if match[1] else rank
        local = int(match[2]) if match[2] else local
    # The weakest sign: `3: ` can begin any message, so it counts only where nothing else names a
    # rank.
    if not found and rank is None and (match := _TASK.match(text)):
        text, rank = text[match.end() :], int(match[1]) if tasks else None
    if rank is None and "Rank " in text and (match := IN_LINE.search(text)):
        rank = int(match[1])
    if rank == named.rank and who.pid == named.pid:
        return text, named, local
    pid = None if who.pid == named.pid else pid_of(who.pid)
    return text, Identity(rank, pid, who.host, named.role), local


def _worker(text: str, named: Identity) -> Identity:
    """Whose line it is by Ray's or vLLM's own prefix: the rank, or the process."""
    rank, process = _RAY_RANK.match(text), _PROCESS.match(text)
    who = replace(named, rank=int(rank[1])) if rank else named
    if process is None:
        return who
    return replace(who, pid=int(process["pid"]), host=process["ip"] or who.host)


def writer_of(raw: str, line: str, who: Identity, named: Identity) -> str:
    """A line's writer by name, for people; empty where none is known.

    Args:
        raw, line, who: the line as it stands, and what `strip` gives for it.
        named: whose the log is, by its file.
    """
    if title := _PROCESS.match(raw):
        return f"{title['title']} (pid {title['pid']})"
    if who.rank is not None:
        of_server = who.role == ENGINE and named.role != ENGINE
        return f"TP{who.rank}" if of_server else f"rank {who.rank}"
    if nccl := NCCL_LINE.match(line):
        return f"{nccl[1]}:{nccl[2]}"
    says = _SAYS_RANK.findall(line)
    return f"rank {says[0]}" if len(says) == 1 else named.role


def _without_outer(text: str) -> str:
    """Prefixes stack up: kubectl's stands before a time, which stands before torchrun's."""
    if "%|" in text and (bar := _BEHIND_BAR.search(text)):
        text = text[bar.end() :]
    while _may_be_outer(text) and (match := _OUTER.match(text)):
        text = text[match.end() :]
    return text


# Launchers of which srun starts one a node: its tasks are no ranks.
_EACH_NODE = re.compile(
    r"torchrun |torch\.distributed\.(?:run|launch)\b|torch/distributed/(?:run|launcher)"
    r"|torch[/.]distributed[/.]elastic|--nproc[-_]per[-_]node"
    r"|accelerate[./]commands[./]launch|accelerate launch |\[default\d{1,4}\]:"
    r"|\bray start |\bray::|RayTaskError|\(raylet"
)


def starts_several(source: EvidenceFile) -> bool:
    """Whether srun, if it is srun, starts one task a node of the job that wrote this log."""
    return _EACH_NODE.search(source.text) is not None
