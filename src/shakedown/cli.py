"""The `shakedown` command: one sub-command a stage, nothing but argument parsing."""

import argparse
import errno
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from shakedown import __version__
from shakedown.commands.arguments import CommandParser
from shakedown.core.errors import (
    CannotJudgeError,
    ExitCode,
    ShakedownError,
    StorageError,
    UsageError,
    did_you_mean,
    storage_hint,
)
from shakedown.core.private import restrict_umask
from shakedown.core.visible import visible_output

# name -> what it does. The module `shakedown.commands.<name>` has EXAMPLES, add_arguments(parser)
# and run(args) -> exit code. Only the chosen one is imported: help answers without torch.
COMMANDS = {
    "lint": "Check a config, also of AReaL and prime-rl, and say what would go wrong.",
    "assets": "Write the demo's model and data, or check the given ones.",
    "preflight": "Check nodes, network and disks before a run.",
    "serve": "Start, check, restart or stop a persistent inference server.",
    "agent": "Run an agent class: once, many at once, in groups.",
    "compare": "Compare token log-probabilities of trainer and inference engine.",
    "train": "Run one training stage under supervision: ours, or any trainer's launch command.",
    "hang": "Collect and analyse the evidence of a hung job.",
    "watch": "Watch a job that runs already, and say when it stalls and why.",
    "debug": "Debuggers for the processes of a run, and profiles of its workers.",
    "accept": "Judge a finished stage: accept its verdict, or fail with one sentence.",
    "allocation": "Parse an allocation string and place its ranks on nodes.",
    "report": "Write one HTML page over all results of a run.",
    "status": "Show what a run is doing now.",
    "logs": "Show the logs of an attempt, each line with its component.",
    "verdict": "Print a verdict file, and exit as its stage did.",
}

# command -> (extra of the distribution, packages of it without which the command cannot run). The
# others need no extra; where `serve` finds no engine, inference/explain.py says so.
EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "agent": ("agents", ("datasets", "openai")),
    "assets": ("train", ("datasets", "torch", "transformers")),
    "compare": ("consistency", ("datasets", "pyarrow", "torch", "transformers")),
    "train": ("train", ("datasets", "torch", "transformers")),
}

# What a path that cannot be one answers, wherever it is first used.
_NO_PATHS = frozenset({errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP})
# What a file system says that is full, read-only, closed to this user or broken.
_STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    umask = restrict_umask()
    try:
        with visible_output():
            return _main(list(sys.argv[1:] if argv is None else argv))
    finally:
        os.umask(umask)


def _main(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except ShakedownError as error:
        print(f"shakedown: {error}", file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:
        # The reader is gone, as after `| head`. Python's flush at exit would fail on the same pipe;
        # this is what its documentation of `signal` advises.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except KeyboardInterrupt:
        print("shakedown: interrupted", file=sys.stderr)
        return 130  # as shells report it: 128 + SIGINT
    except Exception as error:
        return _unforeseen(error)


def _unforeseen(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno in _NO_PATHS and error.filename:
        print(f"shakedown: {error.filename!s:.200}: {error.strerror}", file=sys.stderr)
        return int(ExitCode.USAGE)
    if isinstance(error, OSError) and error.errno in _STORAGE:
        where = f"cannot use {error.filename}: " if error.filename else ""
        hint = storage_hint(error, "choose another folder")
        print(f"shakedown: {StorageError(f'{where}{error.strerror}', hint=hint)}", file=sys.stderr)
        return int(StorageError.exit_code)
    traceback.print_exc()
    print("shakedown: internal error, please report the lines above", file=sys.stderr)
    return int(ExitCode.UNKNOWN)


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if not name or name.startswith("-"):
        _overview().parse_args(arguments)  # ends here with --help, --version or a wrong option
        _overview().print_help()
        return int(ExitCode.OK)
    if name not in COMMANDS:
        raise UsageError(
            f"unknown command {name!r}{did_you_mean(name, COMMANDS)}",
            hint="shakedown --help",
        )
    module, parser = command_parser(name)
    # `called_with`: for a command that leaves word of how to go on with what it began.
    parsed = parser.parse_args(arguments[1:], argparse.Namespace(called_with=arguments))
    # After the parser: `--help` needs no extra. A command may need its own for some arguments only.
    needs_extra = getattr(module, "needs_extra", None)
    if needs_extra is None or needs_extra(parsed):
        _require_extra(name)
    result: int = module.run(parsed)
    return result


def command_parser(name: str) -> tuple[ModuleType, CommandParser]:
    """The module of a command, and its parser."""
    module = importlib.import_module(f"shakedown.commands.{name}")
    parser = CommandParser(
        prog=f"shakedown {name}", description=COMMANDS[name], examples=module.EXAMPLES
    )
    module.add_arguments(parser)
    return module, parser


def _require_extra(command: str) -> None:
    """Ask before anything is started: a rank would say it in its log, minutes later.

    Raises:
        CannotJudgeError: a package that the command needs is not installed.
    """
    extra, packages = EXTRAS.get(command, ("", ()))
    # Found, not imported: torch alone takes seconds.
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise CannotJudgeError(
            f"shakedown {command} needs packages that are not installed here: {', '.join(missing)}",
            hint=f"pip install 'slurm-shakedown[{extra}]'",
        )


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    what = "Bring an LLM RL post-training run up on Slurm, and say why it does not work."
    parser = CommandParser(
        prog="shakedown",
        description=f"{what}\n\ncommands:\n{rows}\n\nshakedown COMMAND --help says more.",
        examples=("shakedown lint config/config.yaml", "shakedown status results/demo"),
    )
    parser.add_argument("--version", action="version", version=f"shakedown {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
