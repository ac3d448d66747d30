"""The resource `slurm_extra`: options at the end of sbatch's command line. Pure.

Options are passed on unchanged, as sbatch knows best which are valid. Only those that the executor
itself relies on are refused, in every spelling.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from snakemake_executor_plugin_submitit.values import ResourceError, line

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
# Read as the resource of that name: the executor asks that cluster, and adds lost nodes.
_RESOURCES = ("clusters", "exclude")
# Short options that are refused or read, and those without a value, behind which others may stand.
_SHORT = {
    "J": "job-name", "o": "output", "e": "error", "a": "array", "W": "wait", "Q": "quiet",
    "h": "help", "V": "version", "D": "chdir", "M": "clusters", "x": "exclude", "n": "ntasks",
}  # fmt: skip
_FLAGS = "HOQVWhksv"
_LONG = re.compile(r"--([A-Za-z][A-Za-z0-9-]*)(?:=(.*))?", re.DOTALL)
# `USR1@120`, `B:USR1@120`, `RB:10`: B is the batch step, R an overlap with a reservation.
_SIGNAL = re.compile(r"(?:([RB]{1,2}):)?([A-Za-z0-9]+(?:@\d{1,5})?)", re.ASCII)


@dataclass(frozen=True)
class Extra:
    """Words for sbatch, each one option with its value; `names`: which options they are.

    Apart are `signal`, its value for sbatch, empty where none is asked for, and `resources`, the
    options that are read as resources.
    """

    words: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    signal: str = ""
    resources: Mapping[str, str] = field(default_factory=dict)


def parse(text: str) -> Extra:
    """Read `slurm_extra`.

    Raises:
        ResourceError: no option, or one that is refused.
    """
    words: list[str] = []
    names: set[str] = set()
    signal = ""
    resources: dict[str, str] = {}
    for word in _joined(_split(line(_WHERE, text))):
        found = list(_names(word))
        for name in found:
            _check(name)
        if found == ["signal"]:
            signal = _signal(word.partition("=")[2])
        elif resource := "".join(name for name in found if name in _RESOURCES):
            if word[1] in _FLAGS:
                raise ResourceError(f"{_WHERE}: {word}: give --{resource} an option of its own")
            resources[resource] = word.partition("=")[2] if word.startswith("--") else word[2:]
        else:
            words.append(word)
            names.update(found)
    return Extra(tuple(words), frozenset(names), signal, resources)


def _split(text: str) -> Iterator[str]:
    """The words; those of a quoted word that holds options, too: `'--mail-type=END -q long'`."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ResourceError(f"{_WHERE}={text[:80]!r}: {error}") from error
    for word in words:
        yield from _nested(word)


def _nested(word: str) -> list[str]:
    if not word.startswith("-"):  # a value of the option before it
        return [word]
    try:
        inner = shlex.split(word)
    except ValueError:  # a value with a quotation mark
        return [word]
    holds_options = any(re.match(r"--?[A-Za-z]", part) for part in inner[1:])
    return inner if len(inner) > 1 and ("=" not in inner[0] or holds_options) else [word]


def _joined(words: Iterator[str]) -> list[str]:
    """Each option with its value in one word: sbatch would take a word of its own for a script."""
    found: list[str] = []
    may_follow = False
    for word in words:
        if len(word) > 1 and word.startswith("-") and word != "--":
            found.append(word)
            may_follow = "=" not in word if word[1] == "-" else not word[1:-1].strip(_FLAGS)
        elif may_follow:
            found[-1] += f"={word}" if found[-1].startswith("--") else word
            may_follow = False
        else:
            raise ResourceError(
                f"{_WHERE}: {word[:80]!r} is no option; expected --name, --name=value, --name value"
                " or a short option of sbatch"
            )
    return found


def _names(word: str) -> Iterator[str]:
    """Which options a word holds, as far as that matters here."""
    if match := _LONG.fullmatch(word):
        yield match[1]
        return
    for letter in word[1:]:
        if letter in _SHORT:
            yield _SHORT[letter]
        if letter not in _FLAGS:
            return


def _check(name: str) -> None:
    # sbatch takes an abbreviation too.
    for refused, reason in _REFUSED.items():
        if refused.startswith(name):
            short = f"--{name} may stand for " if name != refused else ""
            raise ResourceError(f"{_WHERE}: {short}--{refused}: {reason}")
    for read in ("signal", *_RESOURCES):
        if name != read and read.startswith(name):
            raise ResourceError(f"{_WHERE}: --{name} may stand for --{read}: write it in full")


def _signal(value: str) -> str:
    """B: the signal goes to the batch step, where the command runs, not to steps alone."""
    match = _SIGNAL.fullmatch(value)
    if match is None:
        raise ResourceError(f"{_WHERE}: --signal={value!r}: expected SIGNAL@SECONDS")
    return f"{'RB' if 'R' in (match[1] or '') else 'B'}:{match[2]}"
