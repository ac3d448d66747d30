"""Progress lines for people: an aligned table that reads well over hours, also in a log file."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

HEADER_EVERY = 20
_FIRST_WAIT, _LONGEST_WAIT = 2.0, 60.0  # seconds between lines
_PATIENCE = 0.01  # of the time so far: a long run says less
_WIDTH = 120
_ECHO_PREFIX = len("[trainer-rank0] ")
_SHOWN = 0.0005  # seconds: a phase below this all the time has no column


@dataclass(frozen=True)
class Column:
    """`rank` says how early a column goes when the terminal is narrow: 0 stays longest."""

    key: str
    title: str
    width: int
    form: str
    rank: int
    phase: bool = False

    def cell(self, row: Mapping[str, float]) -> str:
        value = row.get(self.key)
        text = "-" if value is None else format(value, self.form)
        return f" {text:>{self.width}}"


COLUMNS: Sequence[Column] = (
    Column("loss", "loss", 10, ".4g", 0),
    Column("reward_mean", "reward", 7, ".3f", 0),
    Column("lr", "lr", 8, ".2e", 3),
    Column("grad_norm", "grad", 8, ".3g", 2),
    Column("tokens_per_second", "tok/s", 8, ".0f", 0),
    Column("mfu", "MFU", 6, ".1%", 2),
    Column("step_seconds", "s/step", 7, ".2f", 1),
    Column("wait_seconds", "wait", 6, ".2f", 4, phase=True),
    Column("score_seconds", "score", 6, ".2f", 6, phase=True),
    Column("forward_backward_seconds", "fwd+bwd", 7, ".2f", 5, phase=True),
    Column("optimizer_seconds", "optim", 6, ".2f", 6, phase=True),
    Column("sync_seconds", "sync", 6, ".2f", 5, phase=True),
    Column("checkpoint_seconds", "ckpt", 6, ".2f", 7, phase=True),
    Column("eval_seconds", "eval", 6, ".2f", 7, phase=True),
    Column("other_seconds", "other", 6, ".2f", 8, phase=True),
    Column("memory_max_gb", "mem GiB", 7, ".2f", 3),
)


class ProgressTable:
    """Turns rows into lines, with a header above every twenty and above other columns.

    Args:
        steps: planned.
        width: of the terminal; that of the variable COLUMNS or of standard output when None.
    """

    def __init__(
        self, steps: int, *, width: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if width is None:
            width = shutil.get_terminal_size((_WIDTH + _ECHO_PREFIX, 0)).columns - _ECHO_PREFIX
        self._steps, self._width, self._clock = steps, width, clock
        self._began, self._said = clock(), float("-inf")
        self._seen: set[str] = set()
        self._header: tuple[str, ...] = ()
        self._lines = 0

    def lines(self, row: Mapping[str, float]) -> list[str]:
        """The lines to print for this row; empty when the last line is too fresh."""
        now, step = self._clock(), int(row["step"])
        pause = min(max(_FIRST_WAIT, _PATIENCE * (now - self._began)), _LONGEST_WAIT)
        self._seen |= {c.key for c in COLUMNS if _worth(c, row)}
        if now - self._said < pause and step not in (1, self._steps):
            return []
        self._said = now
        return self._with_header(f"step {step}/{self._steps}", row)

    def _with_header(self, first: str, row: Mapping[str, float]) -> list[str]:
        margin = len(f"step {self._steps}/{self._steps}")
        shown = fitting([c for c in COLUMNS if c.key in self._seen], self._width - margin)
        line = f"{first:<{margin}}" + "".join(column.cell(row) for column in shown)
        titles = tuple(column.title for column in shown)
        if titles == self._header and self._lines < HEADER_EVERY:
            self._lines += 1
            return [line]
        self._header, self._lines = titles, 1
        header = f"{'step':<{margin}}" + "".join(f" {c.title:>{c.width}}" for c in shown)
        return [header, line]


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit into `width` characters: the least important ones go first."""
    shown = list(columns)
    while shown and sum(column.width + 1 for column in shown) > width:
        # Of two as important the right one goes.
        shown.remove(max(reversed(shown), key=lambda column: column.rank))
    return shown


def _worth(column: Column, row: Mapping[str, float]) -> bool:
    value = row.get(column.key)
    return value is not None and (not column.phase or value >= _SHOWN)
