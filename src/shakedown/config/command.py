"""A stage that is the launch command of any trainer: its keys, and the placeholders in them."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from shakedown.config.values import Place, Positive, Seconds, Section, SupervisedStage
from shakedown.core.errors import UsageError, did_you_mean
from shakedown.progress.patience import Patience

# Each placeholder's meaning; docs/any-trainer.md has the table for users.
PLACEHOLDERS: Mapping[str, str] = {
    "resume": "the newest checkpoint of `resume.glob`; empty where there is none",
    "nodes": "how many nodes",
    "ranks_per_node": "ranks a node",
    "ranks": "ranks in all",
    "hosts": "names of the nodes, with commas between",
    "head": "the first node's address, which the others reach",
    "port": "a port that was free on the first node",
    "run": "the run's results folder",
    "stage": "the stage's results folder",
    "server_url": "where the run's persistent server answers, without /v1",
    "server_key_file": "the file with the key that the server asks for",
    "model": "the model of the stage before, else the run's",
    "data": "the run's training data",
    "heldout": "the run's held-out data",
}
_OF_AN_ATTEMPT = frozenset({"resume", "hosts", "head", "port"})
# `${name}` is the shell's and OmegaConf's; `{{` and `}}` are braces of the command itself.
_BRACES = re.compile(r"\{\{|\}\}|(?<!\$)\{([A-Za-z_]+)\}")
# Beside a placeholder in its word: paths and options, of which no shell or interpreter makes code.
_PLAIN = re.compile(r"[\w.,:/@%+=-]*")
# Characters that a shell, or a second one on another host, would not read as plain text.
_READ_BY_SHELLS = re.compile(r"""[\x00-\x1f\x7f$`"'\\;&|<>(){}*?!#~^]""")
_ENVIRONMENT = "SHAKEDOWN_"  # + the placeholder's name in capitals


def placeholders_in(text: str) -> list[str]:
    """Names in braces, known or not, in their order."""
    return [match[1] for match in _BRACES.finditer(text) if match[1]]


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with each placeholder's value; a value is never looked at again."""

    def filled(match: re.Match[str]) -> str:
        return values[match[1]] if match[1] else match[0][0]

    return _BRACES.sub(filled, text)


def words_of(command: str, values: Mapping[str, str]) -> list[str]:
    """The words of a command. It is cut first: a value never becomes two of them.

    Raises:
        UsageError: a value that it asks for has characters that a shell reads.
    """
    for name in placeholders_in(command):
        if found := _READ_BY_SHELLS.search(values[name]):
            raise UsageError(
                f"{{{name}}} of the command is {values[name]!r}: a shell that the command starts "
                f"would read {found[0]!r} in it; expected a name without such characters",
                hint=f"rename it, or leave {{{name}}} out and read "
                f'"${variable(name)}" in a script, which has the exact text',
            )
    return [fill(word, values) for word in shlex.split(command)]


def harmless(text: str) -> str:
    """The text as a word of a command: `_` for each character that a shell would read."""
    return _READ_BY_SHELLS.sub("_", text)


def variable(name: str) -> str:
    """The environment variable that has a placeholder's exact value."""
    return f"{_ENVIRONMENT}{name.upper()}"


def environment_of(values: Mapping[str, str]) -> dict[str, str]:
    """All values as variables, which a script reads safely; none has room for a NUL."""
    return {variable(name): value.replace("\0", "") for name, value in values.items()}


def _known(text: str) -> str:
    for name in placeholders_in(text):
        if name not in PLACEHOLDERS:
            guess = did_you_mean(name, PLACEHOLDERS)
            raise ValueError(
                f"unknown placeholder {{{name}}}{guess}; valid: {', '.join(PLACEHOLDERS)}; "
                f"braces of the command itself are written twice: {{{{{name}}}}}"
            )
    return text


def is_a_command(text: str) -> str:
    """The text, if it can be cut into words and no placeholder is inside a quoted text.

    Raises:
        ValueError: it cannot be cut, or a placeholder is.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be cut into words as a shell does: {error}") from error
    for word in words:
        names = placeholders_in(word)
        if names and not _PLAIN.fullmatch(_BRACES.sub(lambda m: "" if m[1] else m[0], word)):
            raise ValueError(
                f"{word!r} has {{{names[0]}}} inside a text, which a shell may read as commands: "
                f"expected a word of its own or a part of a path or option, such as {{{names[0]}}} "
                f'or --option={{{names[0]}}}; in a script write "${variable(names[0])}"'
            )
    return text


Template = Annotated[Place, AfterValidator(_known)]
CommandLine = Annotated[Template, AfterValidator(is_a_command)]


class ProgressConfig(Section):
    """Where the step is read: a log's line (`pattern`), a table (`file`), or TensorBoard's events.

    `pattern` has a group `step`; other named groups, and numbers after a name, are curves.
    `tensorboard`: a folder of event files, or a glob; with `tag` its steps alone count.
    """

    pattern: str = ""
    file: Template = ""
    column: str = "step"
    tensorboard: Template = ""
    tag: str = ""

    @field_validator("pattern")
    @classmethod
    def _finds_a_step(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groupindex
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        if pattern and "step" not in groups:
            raise ValueError(r"has no group of the name step, such as (?P<step>\d+)")
        return pattern

    @model_validator(mode="after")
    def _one_of_both(self) -> "ProgressConfig":
        if [bool(self.pattern), bool(self.file), bool(self.tensorboard)].count(True) != 1:
            raise ValueError(
                "expected one of `pattern`, `file` and `tensorboard`, or `progress: none`"
            )
        if self.tag and not self.tensorboard:
            raise ValueError("`tag` needs `tensorboard`, whose events have tags")
        return self

    @property
    def place(self) -> str:
        """The template of the path that is read; empty where it is the stage's logs."""
        return self.file or self.tensorboard


class ResumeConfig(Section):
    """Checkpoints to go on from: the one of the highest number in its name is the newest.

    `complete`: a file that only a whole checkpoint has. `arguments` are added to the command where
    there is a checkpoint.
    """

    glob: Annotated[Template, Field(min_length=1)]
    complete: str = ""
    arguments: CommandLine = ""


class CommandStage(SupervisedStage):
    """A stage that is a command. Each of `outputs` has to be there in the end."""

    algorithm: Literal["command"]
    launch: Literal["torchrun", "srun", "accelerate", "ray", "none"]
    command: Annotated[CommandLine, Field(min_length=1)]
    ranks_per_node: Positive = 1
    python: Place = ""
    steps: Positive | None = None
    progress: Annotated[
        ProgressConfig | None, BeforeValidator(lambda given: None if given == "none" else given)
    ] = None
    resume: ResumeConfig | None = None
    outputs: list[Template] = []
    signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    # Longer than for our own stages, whose phases are known: a checkpoint counts as a stall here.
    stall_timeout: Seconds = Patience.work

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def templates(self) -> Iterator[str]:
        """All texts in which placeholders are filled in."""
        yield self.command
        yield from self.outputs
        if self.progress:
            yield self.progress.place
        if self.resume:
            yield from (self.resume.glob, self.resume.arguments)

    @property
    def placeholders(self) -> frozenset[str]:
        """Names of those that are used."""
        return frozenset(name for text in self.templates for name in placeholders_in(text))

    @model_validator(mode="after")
    def _resume_has_a_glob(self) -> "CommandStage":
        if self.resume is None and "resume" in self.placeholders:
            raise ValueError("{resume} needs `resume: {glob: ...}`, which finds the checkpoints")
        for text in (*self.outputs, *([self.resume.glob] if self.resume else [])):
            for name in placeholders_in(text):
                if name in _OF_AN_ATTEMPT:
                    raise ValueError(
                        f"{text}: {{{name}}} is another one in each attempt: checkpoints and "
                        "outputs must be found again"
                    )
        return self
