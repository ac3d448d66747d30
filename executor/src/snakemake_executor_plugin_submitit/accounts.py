"""The account to charge: whether the user has the given one, and which one to guess."""

import os
import pwd
import re
from collections.abc import Sequence

from snakemake_executor_plugin_submitit.slurm import SlurmError, run
from snakemake_executor_plugin_submitit.values import ResourceError

# sacct's words for a job without an account.
_NO_ACCOUNT = ("", "(null)", "none")
# Far enough back to find a job, near enough for a large database.
_RECENT = "now-30days"
_LAST_FORMAT = ("--format", "Submit,Account")
_ACCOUNT = re.compile(r"\baccount\b", re.IGNORECASE)


class Accounts:
    """The user's accounts, asked for once, at the first job that names one."""

    def __init__(self) -> None:
        self._known: list[str] | None = None

    def chosen(self, names: Sequence[str]) -> str:
        """The first of `names` that the user has, in the database's spelling.

        Without a database that answers it is the first: Slurm itself may refuse it.

        Raises:
            ResourceError: the user has none of them; the message lists those there are.
        """
        if self._known is None:
            self._known = _of_user()
        spelled = {account.lower(): account for account in self._known}
        if not spelled:
            return names[0]
        for name in names:
            if name.lower() in spelled:
                return spelled[name.lower()]
        raise ResourceError(
            f"resource slurm_account={','.join(names)!r}: this user has no such account;"
            f" valid: {', '.join(self._known)}"
        )


def guess() -> str | None:
    """The user's default account, else that of the last job of 30 days; None when unknown."""
    user = _user()
    if user is None:
        return None
    default = parse(_ask("sacctmgr", "list", "user", user, "format=defaultaccount"))
    if default:
        return default[0]
    return last_account(
        _ask("sacct", "--allocations", "--user", user, "--starttime", _RECENT, *_LAST_FORMAT)
    )


def wants_account(words: str) -> bool:
    """Whether sbatch refused because of the account: its own words, or those of a site's filter."""
    return _ACCOUNT.search(words) is not None


def parse(text: str) -> list[str]:
    """Accounts, one per line, each once, in order."""
    names = [line.strip(" |") for line in text.splitlines()]
    return list(dict.fromkeys(name for name in names if name.lower() not in _NO_ACCOUNT))


def last_account(text: str) -> str | None:
    """The account of the latest of lines `time|account`; None when no line has one."""
    rows = [line.strip().partition("|") for line in text.splitlines()]
    with_account = [(time, name) for time, _, name in rows if name.lower() not in _NO_ACCOUNT]
    return max(with_account)[1] if with_account else None


def _of_user() -> list[str]:
    user = _user()
    if user is None:
        return []
    return parse(_ask("sacctmgr", "--associations", "list", "user", user, "format=account"))


def _user() -> str | None:
    """The name that Slurm knows; LOGNAME may be another's. None for a uid without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None


def _ask(program: str, *arguments: str) -> str:
    """The answer; empty without a database, or if it does not answer."""
    try:
        return run([program, "--noheader", "--parsable2", *arguments])
    except SlurmError:
        return ""
