"""Collect from hosts without Slurm: the collector runs on each by ssh, its evidence comes back.

No folder need be shared: a host's collector writes an archive to its standard output, and its
files are in a folder of the host's name. A host that does not answer does not stop the others and
is not taken for dead: why it was missed is written down, apart from the evidence.
"""

import re
import shlex
import subprocess
import tarfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, cast

from shakedown.core.errors import UsageError
from shakedown.core.files import read_object
from shakedown.core.paths import expand_home
from shakedown.monitor.collect.archive import unpack
from shakedown.monitor.collect.bounded import run_bounded
from shakedown.monitor.collect.report import NodesReport
from shakedown.monitor.collect.steps import COLLECTOR, END_SECONDS, STEP_SECONDS, end, told
from shakedown.monitor.collect.writer import COLLECTED, NAMES, READ, Writer, printable
from shakedown.slurm.hostlist import expand_nodelist

MOST_HOSTS = 64  # at once: samples of one moment tell more, and an ssh takes 10 MB
CONNECT_SECONDS = 10
# Output of a login shell's own files comes before the archive.
_MARK = "shakedown evidence follows"
_MOST_NOISE = 1000  # lines
_OPTIONS = {
    "BatchMode": "yes",  # nobody is there to be asked for a password or a host's key
    "ConnectTimeout": str(CONNECT_SECONDS),
    "ServerAliveInterval": "15",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "ControlMaster": "no",  # a master that stays behind would hold our pipes open
    "Compression": "yes",
    "LogLevel": "ERROR",  # no banners
}
# `node1`, or as mpirun and deepspeed take it, `node1 slots=8`.
_LINE = re.compile(r"(\S+)(?:\s+\w+=\S*)*")


def parse_hosts(text: str) -> list[str]:
    """The hosts of `n1,n2`, `n[1-4]`, or `@FILE`: one per line, `#` begins a comment.

    Raises:
        UsageError: no host, or one whose name could be anything else in a command.
    """
    try:
        lists = _lines(Path(expand_home(text[1:]))) if text.startswith("@") else [text]
        names = [name for each in lists for name in expand_nodelist(each)]
    except (OSError, ValueError, UsageError) as error:
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UsageError(
            f"--hosts {text[:80]!r}: {why}",
            hint="--hosts n1,n2 or --hosts @FILE, one host per line; users, ports and addresses "
            "belong in ~/.ssh/config",
        ) from error
    if not names:
        raise UsageError(f"--hosts {text[:80]!r}: no host", hint="--hosts n1,n2")
    return list(dict.fromkeys(names))


def _lines(path: Path) -> list[str]:
    """The first word of each line.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line has more in it than a host and settings such as `slots=8`.
    """
    hosts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if words := line.partition("#")[0].strip():
            match = _LINE.fullmatch(words)
            if match is None:
                raise ValueError(f"line {number}, {words[:80]!r}: expected `n1` or `n1 slots=8`")
            hosts.append(match[1])
    return hosts


def collect_hosts(
    hosts: Sequence[str],
    out: Path,
    arguments: Sequence[str],
    seconds: float,
    python: str,
) -> NodesReport:
    """Write the evidence of each host to a folder of its name in `out`.

    Args:
        arguments: of the collector on each host, such as `--match train.py`.
        seconds: how long a collector sleeps between its samples, all in all.
        python: the interpreter on the hosts.

    Nothing is raised for a host that fails.
    """
    limit = STEP_SECONDS + seconds
    remote = [python, *COLLECTOR, *arguments, "--out", "-"]
    command = f"echo {shlex.quote(_MARK)}; exec {shlex.join(remote)}"
    jobs = [partial(_collect, host, command, out.absolute() / host, limit) for host in hosts]
    batches = -(-len(hosts) // MOST_HOSTS)
    answers = run_bounded(jobs, MOST_HOSTS, (limit + 2 * END_SECONDS) * batches)
    writer, report = Writer(out.absolute()), NodesReport()
    for host, given in zip(hosts, answers, strict=True):
        lost = _HostAnswer(f"not read: {given or 'no answer in time'}")
        answer = given if isinstance(given, _HostAnswer) else lost
        report.nodes[host] = answer.said
        report.tables += answer.tables
        writer.files += [f"{host}/{name}" for name in answer.files]
        writer.missed += [f"{host}: {text}" for text in answer.missed]
    report.write(writer, NAMES.collected("hosts"), {"hosts": list(hosts)})
    return report


def ssh_argv(host: str, command: str) -> list[str]:
    """The argv of ssh, with the command as one argument: ssh would join several by blanks."""
    options = [f"-o{name}={value}" for name, value in _OPTIONS.items()]
    return ["ssh", "-T", *options, "--", host, command]


@dataclass(frozen=True)
class _HostAnswer:
    """The result of a host: read, or why not; its collector's own table, if it came."""

    said: str
    tables: list[dict[str, object]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


def _collect(host: str, command: str, out: Path, limit: float) -> _HostAnswer:
    """Run the collector on `host`; bounded in time."""
    writer = Writer(out)
    process = subprocess.Popen(
        ssh_argv(host, command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    words, timer = _Words(process), threading.Timer(limit, process.terminate)
    timer.daemon = True
    timer.start()
    broken = _receive(process, writer)
    late = not timer.is_alive()
    timer.cancel()
    end(process, END_SECONDS)
    missed = [*writer.summary(), *([broken] if broken else [])]
    if tables := _tables(writer):
        return _HostAnswer(READ, tables, writer.files, missed)
    # ssh ends as the collector did, which has said why when that is not 0.
    why = (told(words.last()) if process.returncode else "") or broken
    why = f"no answer in {limit:.0f} s" if late else why or "no table of what was read came back"
    return _HostAnswer(f"not read: {why}", [], writer.files, writer.summary())


def _receive(process: subprocess.Popen[bytes], writer: Writer) -> str:
    """Write what the host sends; returns the fault in it, or empty."""
    with cast("IO[bytes]", process.stdout) as stream:
        try:
            for _ in range(_MOST_NOISE):
                line = stream.readline(4096)
                if not line or line.rstrip().endswith(_MARK.encode()):
                    break
            unpack(stream, writer)
        except (OSError, ValueError, tarfile.TarError) as error:
            return printable(f"its evidence broke off: {error}")
    return ""


class _Words:
    """The end of what ssh, and the collector behind it, write to standard error."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._stream = cast("IO[bytes]", process.stderr)
        self._end = b""
        self._thread = threading.Thread(target=self._read, name="ssh-says", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while part := self._stream.readline(4096):
                self._end = (self._end + part)[-4096:]

    def last(self) -> bytes:
        self._thread.join(timeout=2.0)  # a proxy that ssh left behind may hold the pipe open
        return self._end


def _tables(writer: Writer) -> list[dict[str, object]]:
    """The collector's own table, which it sends with the rest."""
    names = sorted(n for n in writer.files if re.fullmatch(r"collected-[^/]*\.json", n))[:1]
    try:
        return [read_object(writer.out / n, "collection", schema=COLLECTED) for n in names]
    except (OSError, UsageError):
        return []
