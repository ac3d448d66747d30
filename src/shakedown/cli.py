"""The `shakedown` command: one sub-command a stage, nothing but argument parsing."""

import argparse
import errno
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence

from shakedown import __version__
from shakedown.core.errors import BlockedError, ExitCode, ShakedownError, UsageError, did_you_mean

# name -> (module with add_arguments(parser) and run(args) -> exit code, one line of help).
# Only the chosen command's module is imported: help answers without torch.
COMMANDS: dict[str, tuple[str, str]] = {
    "lint": ("shakedown.commands.lint", "check a config file and say what would go wrong"),
    "assets": (
        "shakedown.commands.assets",
        "write the demo model and data, or check the given ones",
    ),
    "preflight": ("shakedown.commands.preflight", "check nodes, network, disks before a run"),
    "serve": ("shakedown.commands.serve", "start, check or stop a persistent inference server"),
    "agent": ("shakedown.commands.agent", "run an agent class: once, many at once, in groups"),
    "compare": ("shakedown.commands.compare", "compare token log-probabilities of two engines"),
    "train": ("shakedown.commands.train", "run one training stage under supervision"),
    "hang": ("shakedown.commands.hang", "collect and analyse the evidence of a hung job"),
    "accept": (
        "shakedown.commands.accept",
        "the gate after a stage: pass, or fail with one sentence",
    ),
    "allocation": ("shakedown.commands.allocation", "parse an allocation string"),
    "report": ("shakedown.commands.report", "write one HTML page over all results of a run"),
    "status": ("shakedown.commands.status", "say what a run is doing now"),
    "logs": ("shakedown.commands.logs", "show all logs of an attempt as one, by time"),
    "verdict": ("shakedown.commands.verdict", "print a verdict file for a person"),
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

_EXIT_CODES = "exit codes: 0 PASS or WARN, 1 FAIL, 2 usage or config error, 3 BLOCKED"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except ShakedownError as error:
        print(f"shakedown: {error}", file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except KeyboardInterrupt:
        print("shakedown: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _unforeseen(error)


def _unforeseen(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno in _NO_PATHS and error.filename:
        print(f"shakedown: {error.filename!s:.200}: {error.strerror}", file=sys.stderr)
        return int(ExitCode.USAGE)
    traceback.print_exc()
    print("shakedown: internal error, please report the lines above", file=sys.stderr)
    return int(ExitCode.BLOCKED)


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if not name or name.startswith("-"):
        _overview().parse_args(arguments)
        _overview().print_help()
        return int(ExitCode.OK)
    if name not in COMMANDS:
        raise UsageError(
            f"unknown command {name!r}{did_you_mean(name, COMMANDS)}",
            hint="shakedown --help",
        )
    module_name, help_line = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(
        prog=f"shakedown {name}",
        description=help_line,
        epilog=_EXIT_CODES,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    module.add_arguments(parser)
    parsed = parser.parse_args(arguments[1:])
    _require_extra(name)
    result: int = module.run(parsed)
    return result


def _require_extra(command: str) -> None:
    """Ask before anything is started: a rank would say it in its log, minutes later.

    Raises:
        BlockedError: a package that the command needs is not installed.
    """
    extra, packages = EXTRAS.get(command, ("", ()))
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise BlockedError(
            f"shakedown {command} needs packages that are not installed here: {', '.join(missing)}",
            hint=f"pip install 'slurm-shakedown[{extra}]'",
        )


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="shakedown",
        description=(__doc__ or "").strip() + f"\n\ncommands:\n{rows}",
        epilog=f"shakedown COMMAND --help says more. {_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shakedown {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
