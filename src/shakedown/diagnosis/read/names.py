"""Who the files of one evidence folder speak of, judged by all their names together.

A lone name misleads: `slurm-4711.out` ends with a job, `4711.txt` with a process, and
`node1_local_rank0.txt` with a rank that other nodes have too.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shakedown.diagnosis.records import Identity

_ROLES = {
    "trainer": "trainer",
    "orchestrator": "orchestrator",
    "rollout": "orchestrator",
    "controller": "orchestrator",
    "inference": "inference",
    "vllm": "inference",
    "sglang": "inference",
    "engine": "inference",
    "server": "inference",
}
_ROLE = re.compile(rf"(?:^|[^a-z])({'|'.join(_ROLES)})(?:[^a-z]|$)")
# What stands before a word must be no letter (`frank3` is no rank), and a number of more digits is
# not cut to its first ones. Names are lower case here.
_RANK = re.compile(r"(?:^|[^a-z])rank[-_ =]?(\d{1,6})(?!\d)")
_PID = re.compile(r"(?:^|[^a-z])pid[-_ =]?(\d{1,8})(?!\d)")
# `host-dmesg.txt` says what it holds, not of which host.
_HOST_WORD = re.compile(
    r"(?:^|[^a-z])(?:host|node)[-_=](?!(?:dmesg|kernel|kern|syslog|messages|journal|logs?)(?![a-z0-9]))"
    r"([a-z0-9][a-z0-9-]*)"
)
_SAMPLE = re.compile(r"(?:^|[^a-z])(?:round|sample)[-_]?(\d{1,3})(?!\d)")
# `_dump_9`, `stacks_r10.log`, `trace_2.json`: at most one letter sticks to the number.
_TRAILING = re.compile(r"(?:^|[^0-9a-z]|[a-z](?=\d))(\d{1,8})(?:\.[a-z]+)*$")

Named = tuple[Identity, int | None]  # identity, and the bare number that may be a rank

_LOCAL = re.compile(r"(?:^|[^a-z])local[-_]?rank[-_ =]?(\d{1,4})(?!\d)")
_NO_RANK = re.compile(r"(?:^|[^a-z])(?:node|group|machine)[-_]?rank[-_ =]?\d")
# `slurm-4711.out`, `slurm-4711_3.out`: a job's number, with that of its array task.
_JOB = re.compile(
    r"^(?:slurm|job|jobid|sacct|scontrol|squeue|sinfo)[-_.]?\d+(?:_\d+)?(?:\.[a-z]+)*$"
)
_HOST = re.compile(r"(?:^|[^a-z0-9])((?:node|host)\d{1,6})(?![a-z0-9])")
# torch's debug server, `stacks_20261128_030000.txt`: a date and a time say when, not whose.
STAMPED = re.compile(r"\d{8}[-_t]\d{6}(?:\.[a-z]+)*$")
# Both a digit and a letter: `facade` is a word and `4711` a number.
_HASH = re.compile(r"^(?=.*\d)(?=.*[a-f])[0-9a-f]{6,64}(?:\.[a-z]+)*$")
_HEX = re.compile(r"[0-9a-f#._-]*")
_FOLDER_RANK = re.compile(r"^(?:[a-z]{0,12}[-_])?rank[-_ =]?(\d{1,6})$")
_FOLDER_HOST = re.compile(r"^((?:node|host)[-_]?\d[a-z0-9-]*)$")
# torchrun --log-dir: RUN_ID/attempt_N/LOCAL_RANK/stderr.log
ELASTIC = re.compile(r"^(.*?)attempt_(\d{1,6})/(\d{1,4})/(?:stdout|stderr|error)\.(?:log|json)")
_ROUND = re.compile(r"(?:^|[^a-z])log[^a-z/](?:[^/]*\.)?\d+$", re.I)
_LOGS = (".log", ".out", ".err", ".txt")
_FEW = 3  # names of which at least two of a series would share a stem
_DIGITS = re.compile(r"\d+")


def identities(names: Sequence[str]) -> Mapping[str, Named]:
    """What each name says, given all the others."""
    found = {name: _one(name) for name in names}
    # The order matters: what names say outright comes before what is only concluded from all of
    # them.
    _ranks_of_nodes(found)
    _ranks_of_torchrun(found)
    _of_no_series(found)
    _of_tasks(found)
    _of_hosts(found)
    _numbers(found)
    return found


def _one(name: str) -> Named:
    identity, trailing = identity_of_name(name)
    *folders, leaf = name.lower().removesuffix(".gz").split("/")
    host, named = identity.host, _HOST.search(leaf)
    if named is not None and not host:
        host = named[1]
        trailing = None if re.fullmatch(r"(?:\.[a-z]+)*", leaf[named.end() :]) else trailing
    # `local_rank0` also matches the pattern of a rank.
    rank = None if _LOCAL.search(leaf) or _NO_RANK.search(leaf) else identity.rank
    if _JOB.match(leaf) or _HASH.match(leaf) or STAMPED.search(leaf):
        trailing = None
    for folder in reversed(folders):
        match = _FOLDER_RANK.match(folder)
        if match and rank is None and identity.pid is None:
            rank, trailing = int(match[1]), None
        host = host or (match[1] if (match := _FOLDER_HOST.match(folder)) else "")
    return Identity(rank, identity.pid, host, identity.role), trailing


def _ranks_of_nodes(found: dict[str, Named]) -> None:
    """A local rank is the rank where the files of one node alone are given."""
    local: dict[str, int] = {}
    nodes: set[str] = set()
    for name in found:
        folder, _, leaf = name.lower().rpartition("/")
        if match := _LOCAL.search(leaf):
            local[name] = int(match[1])
            nodes.add(f"{folder}/{leaf[: match.start(1)]}")
    for name, number in local.items():
        identity, _ = found[name]
        rank = number if len(nodes) == 1 and identity.rank is None else identity.rank
        found[name] = replace(identity, rank=rank), None


def _ranks_of_torchrun(found: dict[str, Named]) -> None:
    """The newest attempt's folders are local ranks: ranks where there is one node."""
    rows = {name: match for name in found if (match := ELASTIC.search(name))}
    newest: dict[str, int] = defaultdict(int)
    for match in rows.values():
        newest[match[1]] = max(newest[match[1]], int(match[2]))
    for name, match in rows.items():
        identity, _ = found[name]
        # Several run folders are several nodes, each with a local rank 0.
        if len(newest) == 1 and int(match[2]) == newest[match[1]] and identity.rank is None:
            found[name] = replace(identity, rank=int(match[3])), None


def superseded(names: Iterable[str]) -> Mapping[str, str]:
    """Files of torchrun's earlier attempts, and why they are not read: the last one is judged."""
    rows = {name: match for name in names if (match := ELASTIC.search(name))}
    newest: dict[str, int] = defaultdict(int)
    for match in rows.values():
        newest[match[1]] = max(newest[match[1]], int(match[2]))
    return {
        name: f"of attempt {match[2]}, which torchrun started again as attempt {newest[match[1]]}"
        for name, match in rows.items()
        if int(match[2]) < newest[match[1]]
    }


def _of_no_series(found: dict[str, Named]) -> None:
    """Numbers at the ends of names without anything in common are parts of hashes."""
    series = Counter(_stem(name) for name, (_, number) in found.items() if number is not None)
    if series.total() < _FEW or not all(map(_HEX.fullmatch, series)) or max(series.values()) > 1:
        return
    for name, (identity, _) in found.items():
        found[name] = identity, None


def _of_tasks(found: dict[str, Named]) -> None:
    """`py.5.n1.out`, `py.6.n1.out`: a number that files share is a node; the other is the task."""
    series: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, (identity, number) in found.items():
        if number is not None and identity.rank is None:
            folder, _, leaf = name.rpartition("/")
            series[folder, template(leaf)].append(name)
    for names in series.values():
        ends = {found[name][1] for name in names}
        fields = [list(map(int, _DIGITS.findall(name.rpartition("/")[2]))) for name in names]
        # A field of the names that counts 0 to n - 1 over the whole series: it can be the rank.
        unique = [c for c in zip(*fields, strict=True) if sorted(c) == list(range(len(names)))]
        if len(ends) < len(names) and len(unique) == 1:
            for name, rank in zip(names, unique[0], strict=True):
                found[name] = replace(found[name][0], rank=rank), None


def _stem(name: str) -> str:
    leaf = name.lower().rpartition("/")[2]
    return template(re.sub(r"\d+(?:\.[a-z]+)*$", "", leaf))


def _of_hosts(found: dict[str, Named]) -> None:
    """`node0_gpu1` and `node1_gpu1`: a number that two nodes share counts within a node."""
    hosts: dict[int, set[str]] = defaultdict(set)
    for identity, number in found.values():
        if number is not None and identity.host:
            hosts[number].add(identity.host)
    if any(len(names) > 1 for names in hosts.values()):
        for name, (identity, number) in found.items():
            found[name] = identity, None if identity.host else number


def _numbers(found: dict[str, Named]) -> None:
    """Ranks count from 0: a number far above the count of files is a process or a job."""
    numbers = {number for _, number in found.values() if number is not None}
    logs: dict[str, list[int]] = defaultdict(list)
    for name, (_, number) in found.items():
        if number is not None and name.endswith(_LOGS):
            logs[_stem(name)].append(number)
    # Ranks count from 0: `worker-1.log` and `worker-2.log` are of nodes, or parts.
    nodes = {
        k for k, row in logs.items() if len(row) > 1 and sorted(row) == [*range(1, len(row) + 1)]
    }
    outputs = [n for name, (_, n) in found.items() if n is not None and name.endswith(".out")]
    series = Counter(_stem(name) for name, (_, number) in found.items() if number is not None)
    for name, (identity, number) in found.items():
        # `log.run.1`, without a `log.run.0`: of a round, or rotated.
        if number and series[_stem(name)] == 1 and _ROUND.search(name):
            found[name] = identity, None
            continue
        if number is not None and name.endswith(_LOGS) and _stem(name) in nodes:
            found[name] = identity, None
            continue
        # What Slurm wrote of rounds 18 and 19: tasks would begin at 0.
        if name.endswith(".out") and min(outputs, default=0) > 1:
            found[name] = identity, None
            continue
        # Room for a few files out of a large job; ids of processes and jobs lie far above it.
        if number is not None and number >= 16 * len(numbers) + 64:
            pid = number if 0 < number < 2**22 else None  # the kernel's highest process id
            found[name] = replace(identity, pid=pid), None


def template(name: str) -> str:
    """A name with its numbers left out: what files of one series share."""
    return _DIGITS.sub("#", name)


def identity_of_name(name: str) -> tuple[Identity, int | None]:
    """What a path says: rank, pid, host, role, and the bare number it ends with."""
    leaf = name.rsplit("/", 1)[-1].lower().removesuffix(".gz")
    rank, pid = _RANK.search(leaf), _PID.search(leaf)
    host, role = _HOST_WORD.search(leaf), _ROLE.search(leaf)
    trailing = _TRAILING.search(leaf)
    identity = Identity(
        rank=int(rank[1]) if rank else None,
        pid=int(pid[1]) if pid else None,
        host=host[1] if host else "",
        role=_ROLES[role[1]] if role else "",
    )
    number = int(trailing[1]) if trailing and not (rank or pid) else None
    return identity, number


def sample_of_name(name: str) -> int:
    """`round2/...` is sample 2; a name without a round is sample 0."""
    found = [int(match[1]) for match in _SAMPLE.finditer(name.lower())]
    return found[-1] if found else 0
