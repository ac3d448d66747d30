"""The parser of every command, and the types and options that several of them share."""

import argparse
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shakedown.core.paths import expand_home
from shakedown.core.private import allow_group_read
from shakedown.debug import debug_settings

if TYPE_CHECKING:
    from shakedown.config import Config

_EXIT_CODES = "exit codes: 0 PASS or WARN, 1 FAIL, 2 usage or config error, 3 UNKNOWN"
_MOST = 10**9
_LONGEST = 1e7  # seconds: 116 days


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that shows the default of each option that has one.

    argparse's own ArgumentDefaultsHelpFormatter also writes "(default: None)" and
    "(default: False)", which nobody can type.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = action.default is None or isinstance(action.default, bool)
        if empty or action.default in ("", [], argparse.SUPPRESS) or not action.option_strings:
            return action.help
        return f"{action.help} (default: %(default)s)"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        """N for every number, as its name in capitals says nothing."""
        kind = getattr(action.type, "func", action.type)
        named = super()._get_default_metavar_for_optional(action)
        return "N" if kind in (int, float, above_zero, _whole, _number) else named


class CommandParser(argparse.ArgumentParser):
    """Parser of a command or action; its help has options, two examples and the exit codes.

    Parsers of actions have this class too: `add_subparsers` takes the class of its parser.
    With the option `nagios` a usage error exits with 3, which Nagios reads as UNKNOWN.
    """

    nagios = ""

    def __init__(
        self, *, description: str = "", examples: Sequence[str] = (), **options: Any
    ) -> None:
        self.examples = examples
        shown = "".join(f"  {example}\n" for example in examples)
        super().__init__(
            description=description,
            epilog=f"examples:\n{shown}\n{_EXIT_CODES}" if examples else _EXIT_CODES,
            formatter_class=_HelpFormatter,
            **options,
        )
        self.register("type", Path, lambda text: Path(place(text)))
        self._given: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._given = args or ()
        return super().parse_known_args(args, namespace)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        asked = self.nagios and self.nagios in self._given
        super().exit(3 if status and asked else status, message)


def key_values(text: str) -> dict[str, Any]:
    """`{"json": 1}`, or `key=value`, whose value is JSON or else plain text.

    Raises:
        argparse.ArgumentTypeError: neither of the two.
    """
    key, separator, value = text.partition("=")
    if not text.lstrip().startswith("{"):
        if not separator or not key.isidentifier():
            raise argparse.ArgumentTypeError(f"{text!r}: expected key=value or a JSON object")
        return {key: _json_or_text(value)}
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object: {error}") from None


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class ActionParsers:
    """The actions of a command, such as `start` and `stop` of `serve`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(
        self, name: str, act: Callable[[argparse.Namespace], int], sentence: str, *examples: str
    ) -> argparse.ArgumentParser:
        """An action that `run_action` will run; `sentence` says what it does."""
        parser = self._parsers.add_parser(
            name, help=sentence, description=sentence, examples=examples
        )
        parser.set_defaults(act=act)
        return parser


def run_action(args: argparse.Namespace) -> int:
    """Run the chosen action and return its exit code."""
    code: int = args.act(args)
    return code


def add_config(parser: argparse.ArgumentParser, *, required: bool = True, why: str = "") -> None:
    """Add `--config`, a run's YAML files; `why` says what they are read for."""
    parser.add_argument(
        "--config",
        nargs="+",
        type=Path,
        required=required,
        metavar="FILE",
        help="the run's YAML files, each overriding the ones before it"
        + (why and f"; used for {why}"),
    )


def run_config(files: Sequence[Path]) -> "Config":
    """The config of `--config`; from here on its `group_reads` applies to all files written.

    Raises:
        ConfigError: as `load_config`.
    """
    from shakedown.config import load_config

    config = load_config(*files)
    if config.group_reads:
        allow_group_read()
    return config


def add_strict(parser: argparse.ArgumentParser) -> None:
    """Add `--strict`: warnings fail."""
    parser.add_argument("--strict", action="store_true", help="exit 1 on a warning")


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Add `--debug` and `--break-at`, for `debug_asked`."""
    parser.add_argument(
        "--debug",
        action="store_true",
        help="stop a process at breakpoint() or an exception until `shakedown debug attach`",
    )
    parser.add_argument(
        "--break-at",
        nargs="+",
        default=[],
        metavar="FILE:LINE",
        help="like --debug, and also stop every process before this line",
    )


def debug_asked(args: argparse.Namespace) -> bool:
    """Whether started processes are to stop for debuggers, by the options or SHAKEDOWN_DEBUG.

    Raises:
        UsageError: a place is not FILE:LINE of a Python file.
        CannotJudgeError: debugpy is not installed.
    """
    if args.debug or args.break_at:
        debug_settings.ask(args.break_at)
    if not debug_settings.is_asked():
        return False
    debug_settings.places()
    debug_settings.require_debugpy()
    return True


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options given on the command line, by name: those that are not None."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """An argument type for whole numbers from `least` to `most`."""
    return functools.partial(_whole, least, most)


def _whole(least: int, most: int, text: str) -> int:
    # int() also accepts blanks, underscores and digits of other scripts, and fails above 4300
    # digits.
    plain = text.isascii() and text.isdecimal() and len(text) <= 20
    if not plain or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {least} to {most}, got {text!r:.60}"
        )
    return int(text)


def number(least: float, most: float) -> Callable[[str], float]:
    """An argument type for numbers from `least` to `most`."""
    return functools.partial(_number, least, most)


def _number(least: float, most: float, text: str) -> float:
    value = _float(text)
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(
            f"expected a number from {least:g} to {most:g}, got {text!r:.60}"
        )
    return value


def above_zero(text: str) -> float:
    """A number above 0 and below 1e7: a time in seconds, a size."""
    value = _float(text)
    if not 0 < value < _LONGEST:
        raise argparse.ArgumentTypeError(
            f"expected a number above 0 and below {_LONGEST:.0f}, got {text!r:.60}"
        )
    return value


def _float(text: str) -> float:
    """The number; NaN, which lies in no range, for any other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def place(text: str) -> str:
    """A path or name, with the `~` of `--option=~/folder` expanded, which shells leave alone."""
    try:
        return expand_home(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


positive = whole(1)
