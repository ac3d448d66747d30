"""The resource `slurm_extra`: sbatch's options in a text. Pure.

| written | read as |
|---|---|
| `--name=value`, `--name value`, `--name` | the option; what takes no value takes no next word |
| `-q long`, `-qlong`, `-HO` | short options of Slurm 22.05 |
| `'--mail-type=END --mail-user=a@b -q long'` | a quoted word that holds options: each of them |
| `--comm=x` | what it abbreviates, as for sbatch |
| an option that has a resource (`--partition`, `--time`, ...) | that resource |
| `--ntasks` | tasks of the whole job, with GPUs too |
| `--gpus=[model:]N` | `gpu`, `gpu_model` |
| `--requeue`, `--no-requeue` | `requeue` |
| `--signal=SIG@N` | `--signal=B:SIG@N`: the command runs in the batch step |
| `_REFUSED` | an error that says why |
| any other | passed on: sites add options |

Of an option that is given twice the last one counts, as for sbatch.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from snakemake_executor_plugin_submitit.values import ResourceError, line, number, option

Options = dict[str, str | bool]

_WHERE = "resource slurm_extra"
_ANSWER = "sbatch's answer is read for the job's id"
_LOG = "the job's log is where the executor looks for it; give the rule a `log:` of its own"
_FOUND = "the executor finds its jobs by it"
_ENVIRONMENT = (
    "the job needs snakemake's environment; set variables in the rule or before snakemake"
)
_NOTHING = "nothing would be submitted"
_FOLDER = "a job runs where snakemake does; give snakemake --directory, or use cd in the rule"
_REFUSED = {
    "job-name": f"{_FOUND}; --submitit-jobname-prefix puts a word in front of it",
    "comment": _FOUND,
    "output": _LOG,
    "error": _LOG,
    "open-mode": "the log of a requeued job keeps what was in it",
    "array": "jobs of equal resources become an array by themselves",
    "wrap": "what runs is the rule's command",
    "wait": "sbatch would not return before the job has ended",
    "parsable": _ANSWER,
    "quiet": _ANSWER,
    "test-only": _NOTHING,
    "help": _NOTHING,
    "usage": _NOTHING,
    "version": _NOTHING,
    "export": _ENVIRONMENT,
    "export-file": _ENVIRONMENT,
    "chdir": _FOLDER,
    "workdir": _FOLDER,
    "uid": "a job's files are open to their owner alone",
}
# sbatch's option -> the resource that is the same.
_RESOURCES = {
    "account": "slurm_account",
    "partition": "slurm_partition",
    "qos": "qos",
    "constraint": "constraint",
    "reservation": "reservation",
    "clusters": "clusters",
    "exclude": "exclude",
    "nodelist": "nodelist",
    "exclusive": "exclusive",
    "gres": "gres",
    "nodes": "nodes",
    "ntasks-per-node": "tasks_per_node",
    "ntasks-per-gpu": "tasks_per_gpu",
    "cpus-per-task": "cpus_per_task",
    "cpus-per-gpu": "cpus_per_gpu",
}
_SHORT = dict(
    pair.split("=")
    for pair in (
        "a=array A=account b=begin B=extra-node-info c=cpus-per-task C=constraint d=dependency"
        " D=chdir e=error F=nodefile G=gpus h=help H=hold i=input J=job-name k=no-kill"
        " L=licenses m=distribution M=clusters n=ntasks N=nodes o=output O=overcommit"
        " p=partition q=qos Q=quiet s=oversubscribe S=core-spec t=time v=verbose V=version"
        " w=nodelist W=wait x=exclude"
    ).split()
)
# Options of sbatch up to 25.05: which take no value, which only behind `=`, which always one.
_FLAGS = frozenset(
    "consolidate-segments contiguous help hold ignore-pbs no-requeue overcommit oversubscribe"
    " parsable quiet reboot requeue spread-job spread-segments stepmgr test-only usage"
    " use-min-nodes verbose version wait".split()
)
_OPTIONAL = frozenset(
    "exclusive get-user-env nice no-kill oom-kill-step propagate resv-ports".split()
)
_WITH_VALUE = frozenset(
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment"
    " constraint container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu"
    " cpus-per-task deadline delay-boot dependency distribution error exclude export export-file"
    " extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task"
    " gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user"
    " mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist nodes"
    " ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output"
    " partition power prefer priority profile qos reservation segment signal sockets-per-node"
    " switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid"
    " wait-all-nodes wckey workdir wrap".split()
)
_KNOWN = _FLAGS | _OPTIONAL | _WITH_VALUE
_LONG = re.compile(r"--([A-Za-z][A-Za-z0-9-]*)(?:=(.*))?", re.DOTALL)
_TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)
# A size without a unit is in MB, as for sbatch; Slurm's MB has 1024 KiB.
_SIZE = re.compile(r"(\d{1,12})([KMGT]?)B?", re.ASCII | re.IGNORECASE)
_KIB = {"K": 1, "": 1 << 10, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}
# `2` or `a100:2`.
_GPUS = re.compile(r"(?:([^:,]+):)?(\d{1,9})", re.ASCII)
# `USR1@120`, `B:USR1@120`, `RB:10`: B is the batch step, R an overlap with a reservation.
_SIGNAL = re.compile(r"(?:([RB]{1,2}):)?([A-Za-z0-9]+(?:@\d{1,5})?)", re.ASCII)


def split(text: str) -> tuple[dict[str, Any], Options]:
    """What the text asks for: as resources, and as options that have no resource.

    Raises:
        ResourceError: no options, one that is refused, or a value that is not of its kind.
    """
    resources: dict[str, Any] = {}
    options: Options = {}
    for name, value in parse(text).items():
        if name in _REFUSED:
            raise ResourceError(f"{_WHERE}: --{name}: {_REFUSED[name]}")
        if name in _SPECIAL:
            resources |= _SPECIAL[name](_value_of(name, value))
        elif name in _RESOURCES:
            resources[_RESOURCES[name]] = value
        elif name in _REWRITTEN:
            options[name] = _REWRITTEN[name](_value_of(name, value))
        else:
            options[name] = value
    # One key for both: the last one counts.
    if "requeue" in options:
        resources["requeue"] = options.pop("requeue")
    return resources, options


def parse(text: str) -> Options:
    """Options by their long names; True for one without a value.

    Raises:
        ResourceError: a word that is no option, a value that is missing or not of one line.
    """
    words = _words(line(_WHERE, text))
    options: Options = {}
    while words:
        word = words.pop(0)
        if len(inner := _nested(word)) > 1:
            words[:0] = inner
            continue
        for name, value in _read(word, words):
            # Put last, so that the last one of two counts.
            key, kept = _switched(name, value)
            options.pop(key, None)
            options[key] = kept
    return options


def slurm_seconds(text: str) -> int | None:
    """Slurm's time as seconds: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None for anything else."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    if match[4] is not None:
        return (first * 60 + second) * 60 + third
    return first * 60 + second


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ResourceError(f"{_WHERE}={text[:80]!r}: {error}") from error


def _nested(word: str) -> list[str]:
    """The options that a quoted word holds; the word itself when it is one option."""
    try:
        inner = shlex.split(word)
    except ValueError:  # a value with a quotation mark
        return [word]
    if len(inner) < 2:
        return [word]
    is_value = word.startswith("--") and "=" in inner[0]
    if is_value and not any(re.match(r"--?[A-Za-z]", part) for part in inner[1:]):
        return [word]
    return inner


def _read(word: str, following: list[str]) -> Iterator[tuple[str, str | bool]]:
    """The options of one word; a value of its own is taken from the following words."""
    if match := _LONG.fullmatch(word):
        name = _full_name(match[1])
        if match[2] is not None:
            yield name, option(f"{_WHERE}: --{name}", match[2])
        else:
            yield name, _following(name, following)
        return
    letters = word[1:] if word.startswith("-") else ""
    if not letters or letters[0] not in _SHORT:
        raise ResourceError(
            f"{_WHERE}: {word[:80]!r} is no option; expected --name, --name=value, --name value"
            " or a short option of sbatch"
        )
    while letters:
        name = _SHORT.get(letters[0], "")
        if not name:
            raise ResourceError(f"{_WHERE}: {word[:80]!r}: sbatch has no option -{letters[0]}")
        letters = letters[1:]
        if name in _FLAGS:
            yield name, True
        elif letters:
            yield name, option(f"{_WHERE}: --{name}", letters.strip())
            return
        else:
            yield name, _following(name, following)


def _following(name: str, words: list[str]) -> str | bool:
    if name in _FLAGS or name in _OPTIONAL:
        return True
    if name in _WITH_VALUE:
        if not words:
            raise ResourceError(f"{_WHERE}: --{name} needs a value")
        return option(f"{_WHERE}: --{name}", words.pop(0))
    # A site's own: a next word that is no option is its value.
    if words and not words[0].startswith("-"):
        return option(f"{_WHERE}: --{name}", words.pop(0))
    return True


def _full_name(name: str) -> str:
    if name in _KNOWN:
        return name
    candidates = sorted(known for known in _KNOWN if known.startswith(name))
    if len(candidates) > 1:
        raise ResourceError(f"{_WHERE}: --{name} may stand for {', '.join(candidates)}")
    return candidates[0] if candidates else name


def _switched(name: str, value: str | bool) -> tuple[str, str | bool]:
    if name not in ("requeue", "no-requeue"):
        return name, value
    if value is not True:
        raise ResourceError(f"{_WHERE}: --{name} takes no value")
    return "requeue", name == "requeue"


def _value_of(name: str, value: str | bool) -> str:
    if isinstance(value, bool):
        raise ResourceError(f"{_WHERE}: --{name} needs a value")
    return value


def _time(value: str) -> dict[str, Any]:
    seconds = slurm_seconds(value)
    if not seconds:
        raise ResourceError(f"{_WHERE}: --time={value!r}: expected minutes, H:M:S or D-H:M:S")
    # Rounded up: `runtime` is in minutes, and no job shall get less time than it asked for.
    return {"runtime": -(-seconds // 60)}


def _megabytes(name: str, value: str) -> int:
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ResourceError(f"{_WHERE}: --{name}={value!r}: expected a size such as 4000 or 4G")
    return -(-int(match[1]) * _KIB[match[2].upper()] // 1024)


def _gpus(value: str) -> dict[str, Any]:
    match = _GPUS.fullmatch(value)
    if match is None:
        raise ResourceError(f"{_WHERE}: --gpus={value!r}: expected a number or MODEL:NUMBER")
    return {"gpu": int(match[2]), **({"gpu_model": match[1]} if match[1] else {})}


def _signal(value: str) -> str:
    """B: the signal goes to the batch step, where the command runs, not to steps alone."""
    match = _SIGNAL.fullmatch(value)
    if match is None:
        raise ResourceError(f"{_WHERE}: --signal={value!r}: expected SIGNAL@SECONDS")
    return f"{'RB' if 'R' in (match[1] or '') else 'B'}:{match[2]}"


_REWRITTEN: Mapping[str, Callable[[str], str]] = {
    "signal": _signal,
    # `tasks` are those of each GPU in some jobs: this is no other word for it.
    "ntasks": lambda value: str(number(f"{_WHERE}: --ntasks", value, 1)),
}
_SPECIAL: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "time": _time,
    "mem": lambda value: {"mem_mb": _megabytes("mem", value)},
    "mem-per-cpu": lambda value: {"mem_mb_per_cpu": _megabytes("mem-per-cpu", value)},
    "gpus": _gpus,
}
