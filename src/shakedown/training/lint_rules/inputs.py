"""Inputs of the rules: the config, and the files that it names. Reads files, runs nothing."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from shakedown.config import CommandStage, Config, StageConfig
from shakedown.core import verdict
from shakedown.core.errors import ShakedownError
from shakedown.core.verdict import Finding
from shakedown.data_sources import Conversation, conversation_of, parse_source, placed_rows, row_of
from shakedown.training.assets import DEMO, needs_heldout_answers, needs_train_answers
from shakedown.training.demo import addition_rows
from shakedown.training.forecast.decoder import Decoder
from shakedown.training.lint_rules.model_sizes import (
    ModelSizes,
    demo_sizes,
    known_decoder,
    read_sizes,
)

_MOST_ROWS = 500  # rows that are read and judged
_MOST_LINE = 1 << 20  # characters: a longer line is not read by lint
_MOST_COUNTED = 1 << 26  # bytes of a file whose rows are counted: some hundredths of a second
_PARQUET = b"PAR1"
_IN_MEMORY = ("tmpfs", "ramfs")


class _LongLineError(Exception):
    """A line is longer than lint reads."""


@dataclass(frozen=True)
class Rows:
    """The first rows of a source; `count`: of all of it, None where that is not known here."""

    first: Sequence[Conversation] = ()
    count: int | None = None
    fault: str = ""


@dataclass(frozen=True)
class Inputs:
    """Everything that a rule may look at.

    Attributes:
        sizes: of a model that is here; None for one of the hub.
        decoder: of a model that can be planned with; else None.
        memory_folders: mount points of file systems in this machine's memory.
    """

    config: Config
    sizes: ModelSizes | None = None
    train: Rows = field(default=Rows())
    heldout: Rows = field(default=Rows())
    memory_folders: tuple[Path, ...] = ()
    decoder: Decoder | None = None

    @property
    def stages(self) -> Iterator[tuple[str, StageConfig]]:
        """Each stage of our own with its key."""
        return ((f"stages.{name}", stage) for name, stage in self.config.own_stages.items())

    @property
    def commands(self) -> Iterator[tuple[str, CommandStage]]:
        """Each stage that is a command with its key."""
        return ((f"stages.{name}", stage) for name, stage in self.config.command_stages.items())

    @property
    def demo_model(self) -> bool:
        """Whether the model is the demo's, in which each character is a token."""
        return self.config.model.source == DEMO


def read_inputs(config: Config) -> Inputs:
    """Look at the model's folder, the first rows and the mounts."""
    source = config.model.source
    return Inputs(
        config,
        demo_sizes() if source == DEMO else read_sizes(Path(source)),
        _rows(config, heldout=False),
        _rows(config, heldout=True),
        _memory_folders(),
        known_decoder(source),
    )


def _rows(config: Config, *, heldout: bool) -> Rows:
    text = config.data.heldout if heldout else config.data.train
    needed = needs_heldout_answers(config) if heldout else needs_train_answers(config)
    if text == DEMO:
        return _demo_rows(config, heldout=heldout)
    source = parse_source(text, form=config.data.format, heldout=heldout)
    path = Path(source.place)
    # `datasets` reads the hub and parquet: too slow for lint, and another extra.
    if source.hub or not path.is_file():
        return Rows()
    if path.suffix == ".parquet":
        return _parquet(path)
    read = row_of if needed else conversation_of
    rows: list[Conversation] = []
    try:
        # The rows before a line that is too long are judged.
        with contextlib.suppress(_LongLineError):
            for place, body in placed_rows(str(source), limit=_MOST_ROWS, lines=_short_lines):
                rows.append(read(body, place))
    except ShakedownError as error:
        return Rows(fault=str(error))
    return Rows(rows, _count(path))


def _parquet(path: Path) -> Rows:
    try:
        with path.open("rb") as stream:
            begin = stream.read(len(_PARQUET))
    except OSError as error:
        return Rows(fault=f"cannot read {path}: {error.strerror}")
    return Rows() if begin == _PARQUET else Rows(fault=f"{path} is not a parquet file")


def _demo_rows(config: Config, *, heldout: bool) -> Rows:
    """A few of the problems: all are alike."""
    size = config.data.heldout_size if heldout else config.data.train_size
    bodies = addition_rows(train_size=3, heldout_size=3, seed=config.seed)[heldout]
    return Rows([row_of(body, DEMO) for body in bodies], size)


def _short_lines(path: Path) -> Iterator[str]:
    """Up to the first line that is too long for here, which may be all of a hostile file.

    Raises:
        _LongLineError: there it is.
    """
    with path.open(encoding="utf-8-sig") as stream:
        while line := stream.readline(_MOST_LINE):
            if len(line) == _MOST_LINE:
                raise _LongLineError
            yield line


def _count(path: Path) -> int | None:
    if path.stat().st_size > _MOST_COUNTED:
        return None
    with path.open("rb") as stream:
        return sum(1 for line in stream if line.strip())


def _memory_folders() -> tuple[Path, ...]:
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    fields = (line.split() for line in islice(lines.splitlines(), 10_000))
    return tuple(Path(each[1]) for each in fields if len(each) > 2 and each[2] in _IN_MEMORY)


def fault(check: str, subject: str, measured: object, expected: str, remedy: str = "") -> Finding:
    """A finding that stops a run, at the key `subject`; an error's text becomes one line."""
    one_line, advised = " ".join(expected.split()), " ".join(remedy.split())
    return verdict.fault(check, subject, measured, one_line, advised)


def advice(check: str, subject: str, measured: object, expected: str, remedy: str = "") -> Finding:
    """A finding about a suspicious setting, which stops nothing."""
    return replace(fault(check, subject, measured, expected, remedy), status="warn")
