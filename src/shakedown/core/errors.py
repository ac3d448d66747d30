"""The error tree; the exit code lives on the class.

ShakedownError
├── UsageError            exit 2: the user's input cannot be used
│   └── ConfigError       exit 2: a config file or key
├── UntrustedError        exit 2: a file or folder of a run that others could have changed
├── RefusedError          exit 2: another process holds the folder
└── CannotJudgeError          exit 3: could not be judged; says what is missing
    ├── ServerError       an inference server that did not start, answer or obey
    ├── StorageError      a file system that is full, read-only or unreadable
    └── LaunchError       a process that could not be started

Every message says what was given, what was expected, where, and what to run next.
"""

import difflib
import errno
import os
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TypeVar

Choice = TypeVar("Choice")


class ExitCode(IntEnum):
    """Exit codes of every `shakedown` command."""

    # argparse ends a wrong command line with 2. 3 differs from 1 because a check that could not run
    # has found neither good nor bad.
    OK = 0
    FAIL = 1
    USAGE = 2
    UNKNOWN = 3


# A component that saved its state and stopped: EX_TEMPFAIL of sysexits.h, try again.
INTERRUPTED = 75


class ShakedownError(Exception):
    """Base of all errors that are shown to the user without a traceback.

    Args:
        message: what was given, what was expected, and where.
        hint: the next command or the change that would help.
    """

    exit_code: ExitCode = ExitCode.UNKNOWN

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        # Kept apart from the message, as a verdict file has its own field for it, `next`.
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  next: {self.hint}" if self.hint else message


class UsageError(ShakedownError):
    """Unusable input on the command line."""

    exit_code = ExitCode.USAGE


class ConfigError(UsageError):
    """A config file or key that cannot be used."""


# Not a UsageError: code that ignores damaged files must not ignore untrusted ones.
class UntrustedError(ShakedownError):
    """A file or folder that steers a run, and that another user could have written."""

    exit_code = ExitCode.USAGE


class RefusedError(ShakedownError):
    """Another process holds what was asked for; the message names it."""

    exit_code = ExitCode.USAGE


class CannotJudgeError(ShakedownError):
    """The question could not be judged; the message names what is missing."""


class ServerError(CannotJudgeError):
    """An inference server did not start, did not answer or did not obey."""


class StorageError(CannotJudgeError):
    """A file system is full, read-only or cannot be read."""


class LaunchError(CannotJudgeError):
    """A process could not be started."""


def look_up(
    what: str, name: str, table: Mapping[str, Choice], *, error: type[ShakedownError] = UsageError
) -> Choice:
    """`table[name]`.

    Raises:
        error: no such name; the message has the nearest one and all valid ones.
    """
    if name not in table:
        guess = did_you_mean(name, table)
        raise error(f"unknown {what} {name!r}{guess}; valid: {', '.join(table)}")
    return table[name]


def storage_hint(error: Exception, otherwise: str = "choose another results folder") -> str:
    """The remedy: free space if the file system, or this user's quota, is full."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    # safetensors passes on the system's message without the error number.
    full = full or any(os.strerror(n) in str(error) for n in (errno.ENOSPC, errno.EDQUOT))
    return f"free space on that file system or {otherwise}" if full else otherwise


def did_you_mean(given: str, valid: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the nearest valid name, or an empty string."""
    # 0.6 is difflib's default.
    matches = difflib.get_close_matches(given, list(valid), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
