"""A job's identity: what it makes, and how. A job of an earlier run replaces today's only if both
match.

"How" is everything that Snakemake's rerun triggers compare (code, params, input files and their
times, software environment), and the config if code that Snakemake does not expand can see it.
Resources, threads and the attempt are left out, as in Snakemake: a retry with more memory makes the
same.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Snakemake's timestamp file in an output folder.
_FOLDER_MARK = ".snakemake_timestamp"


@dataclass(frozen=True)
class JobIdentity:
    """`makes`: the outputs' paths, or the rule and wildcards of a job without any."""

    makes: tuple[str, ...]
    how: str


def identify(job: Any) -> JobIdentity:
    """The identity of a Snakemake job, or of a group of jobs as one."""
    # Snakemake keeps a group's jobs as a set, which has no order.
    members = sorted(job.jobs, key=str) if job.is_group() else [job]
    outputs = sorted(str(path) for member in members for path in member.output)
    names = [f"{member.rule.name} {dict(member.wildcards_dict)}" for member in members]
    how = [_how(member, inside=outputs) for member in members]
    digest = hashlib.sha256(json.dumps(how, default=repr).encode()).hexdigest()
    return JobIdentity(tuple(outputs or names), digest)


def _how(job: Any, inside: Collection[str]) -> dict[str, Any]:
    """`inside`: outputs of the job's own group, whose times mean nothing."""
    triggers = job.dag.workflow.persistence  # as Snakemake records them for a finished job
    paths = [path for path in job.input if str(path) not in inside]
    return {
        "rule": job.rule.name,
        "wildcards": sorted(dict(job.wildcards_dict).items()),
        "code": triggers._code(job.rule),
        "expanded": _expanded(job),
        "params": triggers._params(job),
        "input": triggers._input(job),
        "times": [_time(path) for path in sorted(paths, key=str)],
        "software": triggers._software_stack_hash(job),
    }


def _expanded(job: Any) -> Sequence[Any]:
    """The command as it is run, or the file that is run and the config that it sees."""
    rule = job.rule
    if rule.shellcmd:
        # Values that change with a retry or another run must not change the identity.
        with suppress(Exception):  # a format such as {resources.mem_mb:d}
            return [job.format_wildcards(rule.shellcmd, resources=_Names(), threads="", jobid="")]
    others = [rule.wrapper, rule.cwl, rule.template_engine]
    return [_script(job), *map(str, others), _ordered(rule.workflow.globals.get("config"))]


def _ordered(value: Any) -> Any:
    """A config without the order of its keys, which need not be of one type."""
    if isinstance(value, Mapping):
        return sorted([repr(key), _ordered(inner)] for key, inner in value.items())
    return [_ordered(inner) for inner in value] if isinstance(value, list) else value


class _Names:
    """A stand-in for a job's resources, in which each value is its name."""

    def __repr__(self) -> str:
        return "resources"

    def __getattr__(self, name: str) -> str:
        return name

    def __getitem__(self, name: str) -> str:
        return name


def _script(job: Any) -> list[str]:
    """Place and content of a `script:` or `notebook:`; nothing for other rules."""
    name = job.rule.script or job.rule.notebook
    if not name:
        return []
    place = job._path_to_source_file(name).get_path_or_uri(secret_free=True)
    try:
        return [str(place), hashlib.sha256(Path(place).read_bytes()).hexdigest()]
    except OSError:  # not of this file system: its place names its version
        return [str(place)]


def _time(path: Any) -> list[Any]:
    """An input's modification time and size; only the name if it is not here."""
    # Snakemake ignores the times of ancient() inputs, and a remote one's time needs a network
    # request.
    if getattr(path, "is_storage", False) or getattr(path, "is_ancient", False):
        return [str(path)]
    mark = Path(path) / _FOLDER_MARK
    try:
        found = (mark if mark.exists() else Path(path)).stat()
    except OSError:
        return [str(path)]
    return [str(path), found.st_mtime_ns, found.st_size]


@dataclass(frozen=True)
class WorkingFolder:
    """A working directory. `device` is meaningful only until the host `boot`s again."""

    path: str
    inode: int
    device: int
    boot: str

    @classmethod
    def here(cls) -> "WorkingFolder":
        """The current directory of this process."""
        path = Path.cwd()
        found = path.stat()
        return cls(str(path), found.st_ino, found.st_dev, _boot())

    def is_same(self, other: "WorkingFolder") -> bool:
        """Whether both are one directory.

        Device numbers of network file systems differ between hosts, and from boot to boot:
        they are compared where they can be.
        """
        return (self.path, self.inode) == (other.path, other.inode) and (
            self.boot != other.boot or self.device == other.device
        )


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not every container shows it
        return os.uname().nodename
