"""Whose a line, a dump or a process is, by what the content says of itself."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shakedown.diagnosis.read.placements import ENGINE
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, SourceRef, clean, pid_of

MAX_HEADER = 250
_RULES = "=#*>~+-<"
# `rank 3`, `[rank3]`, `Global rank 3 (node1):` on a line of its own.
# `DP rank 0`, `(pid 7) rank=2`, too.
_BARE = re.compile(
    r"(?:\(pid[ =:]?\d{1,8}\),? )?(?:\[?(?:(?:global|trainer|[dtpec]p) )?rank[ =:#]{0,2}\d{1,6}\]?)"
    r" ?(?:\([^()]{0,80}\))? ?:?",
    re.I,
)
# A local, node or group rank is not the job's rank: many ranks share it.
_HEADER_RANK = re.compile(
    r"(?<![a-z])(?<!local[-_ ])(?<!node[-_ ])(?<!group[-_ ])rank[ =:#_-]{0,3}(\d{1,6})\b", re.I
)
_LOCAL = re.compile(r"(?:local|node|group)[-_ ]?rank[ =:#_-]{0,3}\d", re.I)
# `node3 | CHANGED | rc=0 >>`
_ANSIBLE = re.compile(r"^([\w.-]{1,80}) \| [A-Z!]{2,12} \| rc=\d{1,3} >>$")
# `=== GPU 3 ===`: taken for a rank only where the line names neither a rank nor a process.
_UNIT = re.compile(r"(?<![a-z])(?:worker|trainer|gpu|task)[ =:#_-]{0,2}(\d{1,5})\b", re.I)
_HEADER_PID = re.compile(r"(?<![a-z])pid[ =:#_-]{0,3}(\d{1,8})\b", re.I)
_HEADER_HOST = re.compile(
    r"(?<![a-z])(?:host|hostname|node)[ =:]{1,3}([A-Za-z0-9][\w.-]{0,63})", re.I
)
# What every header begins with; most lines of a long log do not, and cost only this.
_HEAD_BEGINS = re.compile(
    r"\s*(?:#|[=#*>~+-]{2}|\(pid\b"
    r"|\[?(?:(?:global|trainer|[dtpec]p)\s+)?rank[\s=:#]*\d{1,6}\]?\s*(?:\(|:\s*$|$))"
    r"|[\w.-]{1,80} \| ",
    re.I,
)
# `$ ssh n1 py-spy dump --pid 41207   # rank 0`: a command with a remark on whom it is of.
_REMARK = re.compile(r"^[^#]{0,200}\bpy-spy dump\b[^#]{0,120}(?=#\s*rank\b)")
_HEADER_ROLE = re.compile(r"(?<![a-z])(trainer|orchestrator|inference)(?![a-z])", re.I)
_SAID = (_HEADER_RANK, _HEADER_PID, _HEADER_HOST, _HEADER_ROLE)


def header(line: str) -> Identity | None:
    """Who the lines after this one speak of; None when the line is no header."""
    if "py-spy dump" in line and (match := _REMARK.match(line)):
        line = line[match.end() :]
    if not line or len(line) > 4 * MAX_HEADER or not _HEAD_BEGINS.match(line):
        return None
    if match := _ANSIBLE.match(line):
        return Identity(host=match[1])
    ruled = _inside_rules(line)
    text = line if ruled is None else ruled
    if not text or len(text) > MAX_HEADER:
        return None
    if ruled is None and not _BARE.fullmatch(" ".join(text.split())):
        return None
    rank, pid, host, role = (
        p.search(text) for p in (_HEADER_RANK, _HEADER_PID, _HEADER_HOST, _HEADER_ROLE)
    )
    if not (rank or pid or _LOCAL.search(text)):
        rank = _UNIT.search(text)
    # A local rank names nobody, but its line is still a header: another process's dump begins.
    if not (rank or pid or host or role or _LOCAL.search(text)):
        return None
    return Identity(
        int(rank[1]) if rank else None,
        int(pid[1]) if pid else None,
        host[1] if host else "",
        role[1].lower() if role else "",
    )


def has_header(lines: Sequence[str]) -> bool:
    """Whether any of the lines is a header."""
    return any(header(line) for line in lines if _HEAD_BEGINS.match(line) or "py-spy dump" in line)


def _inside_rules(line: str) -> str | None:
    """What stands between two rules, or after one; None without a rule. No pattern: a long rule
    would make one backtrack for minutes."""
    line = line.strip()
    text = line.lstrip(_RULES[:-1])
    if not line.startswith("#") and len(line) - len(text) < 2:
        return None
    text = text.rstrip(":").rstrip()
    bare = text.rstrip(_RULES.replace(">", ""))
    return (bare if len(text) - len(bare) >= 2 else text).strip()


# ---------------------------------------------------------------- lines of logs

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
# talosctl dmesg: `10.0.0.7: kern: warning: [2026-04-22T21:25:20.458998481Z]: NVRM: Xid ...`
_TALOS = re.compile(r"^([\w.:-]{1,80}): kern: {1,8}\w{1,10}: (?=\[)")
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
    if ": kern: " in text[:100] and (match := _TALOS.match(text)):
        return text[match.end() :], Identity(host=match[1]), None
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


# ---------------------------------------------------------------- processes

# `sglang::scheduler_DP1_TP3_EP3`, `VLLM::EngineCore_DP1`, `VLLM::Worker_TP` (cut off by the kernel)
_ENGINE_TITLE = re.compile(
    r"^(?:sglang|SGLang|VLLM|vllm)::([A-Za-z]\w{0,60}?)((?:_[A-Z]{2}\d{0,4})*)(?: |$)"
)
_AXIS = re.compile(r"_([A-Z]{2})(\d{1,4})")
# `python train.py --local_rank=3`, as torch.distributed.launch passes it.
_RANK_ARGUMENT = re.compile(r"--(?:local[-_]|node[-_]|global[-_])?rank[= ](\d{1,6})\b")
_ROLE_COMMAND = (
    (re.compile(r"vllm serve|sglang|vllm\.entrypoints|EngineCore"), ENGINE),
    (re.compile(r"orchestrator"), "orchestrator"),
)


class Title(NamedTuple):
    """The name of an engine's process, and its numbers: {"DP": 1, "TP": 3}."""

    name: str
    numbers: Mapping[str, int]


def title_of(command: str) -> Title | None:
    """What an engine calls its process; None for any other one."""
    match = _ENGINE_TITLE.match(command)
    if match is None:
        return None
    return Title(match[1], {axis: int(n) for axis, n in _AXIS.findall(match[2])})


def of_command(command: str) -> Identity:
    """A rank and a role as a command line tells them."""
    rank = _RANK_ARGUMENT.search(command)
    role = next((role for pattern, role in _ROLE_COMMAND if pattern.search(command)), "")
    return Identity(int(rank[1]) if rank else None, role=role)


# ---------------------------------------------------------------- logs as a whole


def of_log(source: EvidenceFile) -> tuple[Identity, bool]:
    """Whose a log is where its lines do not say, and whether it is the kernel's of a node."""
    # A kernel's log is its node's, whatever number its name ends with.
    if (node := node_of(source)) is not None:
        return Identity(host=node), True
    named = source.who()
    if source.identity.rank is None and _of_several(source):
        named = replace(named, rank=None)
    if named.role and not _ROLE_FILE.search(source.name.lower()) and "[rank" in source.text:
        named = replace(named, role="")
    return named, False


# A launcher's or a server's lines: the log is of all ranks, whatever number its name ends with.
_OF_SEVERAL = re.compile(
    r"torch\.distributed\.run|torch/distributed/run\.py|elastic\.multiprocessing\.api|^srun: "
    r"|^\((?:APIServer|EngineCore|Worker)\w{0,20} pid="
    r"|^\[[\d-]{10} [\d:]{8}(?: [DP]P\d{1,4}){0,2} TP\d",
    re.M,
)
_LABELLED = re.compile(rf"^\[rank(\d{{1,6}})\]:|{IN_LINE.pattern}", re.M)


def _of_several(source: EvidenceFile) -> bool:
    """Whether the lines say of themselves that they are others' than the name's number tells."""
    written = "[rank" in source.text or "Rank " in source.text
    labels = {a or b for a, b in _LABELLED.findall(source.text)} if written else set()
    others = labels - {str(source.trailing)}
    return bool(others) or _OF_SEVERAL.search(source.text) is not None


# `inference.log`, `inference-0.log` is a role's own; `server_build.txt` only sounds like one, and
# its lines with a rank are the ranks'.
_ROLE_FILE = re.compile(
    r"(?:^|/)(?:rollout[-_])?(?:inference|orchestrator|vllm|sglang|server|engine)[-_.\d]*(?:log|out|err)"
)


# Lines that only the kernel writes.
_KERNEL = re.compile(
    r"NVRM: |oom-killer|oom-kill:|[Oo]ut of memory: Killed process"
    r"|INFO: task \S{1,40} blocked for more than"
)
# `May 16 02:14:37 n1 kernel: NVRM: ...`, as syslog and journalctl write it, or the shell in which
# somebody asked: `[root@n1 ~]# dmesg -T`
_LOGGED_BY = re.compile(  # in talosctl's lines each has its own node, see `strip`
    r"^[A-Z][a-z]{2} [ \d]\d [\d:]{8} (\S{1,80}) kernel: "
    r"|^\[?(?:[\w.-]{1,40}@)?([A-Za-z][\w.-]{1,79})[ :][^\n#$]{0,80}[#$] [^\n]{0,40}\bdmesg\b",
    re.M,
)


# `gpu-011_dmesg.txt`, `ps_gpu-011.txt`: what a file is, beside whose.
_WORDS = r"(?:dmesg|kern(?:el)?|messages|syslog|journal(?:ctl)?|ps|top|(?:nvidia[-_]?)?smi|logs?)"
_KIND = re.compile(rf"^{_WORDS}(?:[-_]|$)|[-_]{_WORDS}$")


def node_of(source: EvidenceFile) -> str | None:
    """The node of a kernel's log, by its lines, its file or its folder; None for any other log."""
    if not _KERNEL.search(source.text):
        return None
    if source.identity.host:
        return source.identity.host
    if len(hosts := {a or b for a, b in _LOGGED_BY.findall(source.text)}) == 1:
        return clean(hosts.pop(), 80)
    *folders, leaf = source.name.split("/")
    stem = _KIND.sub("", leaf.split(".", 1)[0])
    named = re.search(r"\d", stem) and re.search(r"[a-z]", stem, re.I)
    return stem if named else (folders[-1] if len(folders) > 1 else "")


# ---------------------------------------------------------------- stacks

MAX_SLICES = 100_000

# What begins the stack of a thread or a process in any of the text formats.
_STACK_BEGINS = (
    r'(?:Process \d{1,8}: |[ \t]{0,8}Thread (?:0x)?[0-9A-Fa-f]{1,32} \([a-z+]{1,40}\): ?"'
    r"|Traceback for thread \d|(?:Current thread|Thread) 0x[0-9a-fA-F]{1,16} .{0,90}most recent)"
)
_Key = Callable[[re.Match[str]], Identity]


def _rank(match: re.Match[str]) -> Identity:
    return Identity(int(match[1]))


def _host(match: re.Match[str]) -> Identity:
    return Identity(host=clean(match[1], 80))


def _ray(match: re.Match[str]) -> Identity:
    return Identity(pid=int(match[1]), host=clean(match[2] or "", 80))


# More telling ones first; a bare name or number before a colon is the weakest sign.
_KINDS: Sequence[tuple[str, _Key]] = (
    (r"(?:\S{1,120} )?\[rank(\d{1,6})\]: ?", _rank),  # a time, a pod or a node may precede
    (r"\[(?:\d{1,4},)?(\d{1,6})\]<std(?:out|err)>: ?", _rank),
    (r"\(\w{0,80} ?pid=(\d{1,8})(?:, ip=([\w.:]{1,60}))?\) ", _ray),
    (r"\[pod/([\w./-]{1,120})\] ?", _host),
    (r"([\w.-]{1,80}?) {0,40}\| ", _host),
    (r" *(\d{1,6}): ?", _rank),
    (r"\[(\d{1,6})\] ", _rank),
    (r"([A-Za-z][\w.-]{0,79}): ?", _host),
)
_ROWS = [
    (re.compile(f"^{prefix}{_STACK_BEGINS}", re.M), re.compile(prefix), key)
    for prefix, key in _KINDS
]
# dshbak, clush -b: the node's name between two rules, its lines below
_SECTION = re.compile(r"^-{8,}\n([A-Za-z][\w.-]{0,80})\n-{8,}$", re.M)
_PLAIN = re.compile(f"^{_STACK_BEGINS}", re.M)


@dataclass(frozen=True)
class Slice(EvidenceFile):
    """The lines of one process out of a file; places name the file's own lines."""

    numbers: tuple[int, ...] = ()

    def place(self, line: int = 0, text: str = "") -> SourceRef:
        # Evidence is quoted by file and line: readers count the lines of the slice.
        own = self.numbers[line - 1] if 0 < line <= len(self.numbers) else line
        return SourceRef(self.name, own, clean(text.strip()))


def split(source: EvidenceFile) -> list[Slice]:
    """One source for each prefix or node; empty when the file is not of such a form."""
    if not any(word in source.text for word in ("Thread ", "Process ", "Traceback for thread")):
        return []
    # A stack that begins without a prefix: what stands before other lines is then no prefix of all.
    if _PLAIN.search(source.text):
        return list(_sections(source)) if _SECTION.search(source.text) else []
    # The prefix is told by a line that begins a stack; then it is looked for on every line.
    row = next((row for row in _ROWS if row[0].search(source.text)), None)
    return list(_slices(source, row[1], row[2])) if row else []


def _sections(source: EvidenceFile) -> Iterator[Slice]:
    first, who = 0, source.identity
    lines = source.lines
    for number, line in enumerate(lines):
        ruled = line.startswith("--------") and _SECTION.match(
            "\n".join(lines[number : number + 3])
        )
        if ruled:
            yield _slice(source, who, lines[first:number], list(range(first + 1, number + 1)))
            first, who = number + 3, Identity(host=clean(ruled[1], 80))
    yield _slice(source, who, lines[first:], list(range(first + 1, len(lines) + 1)))


def _slices(source: EvidenceFile, prefix: re.Pattern[str], key: _Key) -> Iterator[Slice]:
    found: dict[Identity, tuple[list[str], list[int]]] = {}
    for number, line in enumerate(source.lines, start=1):
        match = prefix.match(line)
        if match is None:
            continue
        who = key(match)
        if who not in found and len(found) >= MAX_SLICES:
            continue
        texts, numbers = found.setdefault(who, ([], []))
        texts.append(line[match.end() :])
        numbers.append(number)
    for who, (texts, numbers) in found.items():
        yield _slice(source, who, texts, numbers)


def _slice(source: EvidenceFile, who: Identity, texts: list[str], numbers: list[int]) -> Slice:
    return Slice(
        path=source.path,
        name=source.name,
        data="\n".join(texts).encode("utf-8", errors="replace"),
        sample=source.sample,
        identity=who.completed_by(Identity(host=source.identity.host)),
        numbers=tuple(numbers),
    )
