"""A server's secret: a file of its owner alone, which the server and its clients read.

It is in no argument, environment or record, so that `ps`, logs, verdicts and reports cannot show
it; records name the file.
"""

import contextlib
import secrets
from pathlib import Path

from shakedown.core import private
from shakedown.core.errors import ShakedownError, UsageError
from shakedown.core.folders import storage_errors


def make_secret(path: Path, given: str = "") -> None:
    """Write `given` or a drawn secret into a new file, unless a good one is there.

    A secret that is there stays: clients of the server's life before go on with it.

    Raises:
        UsageError: `given` cannot stand in a header.
        StorageError: the file cannot be written.
    """
    if not (given.isascii() and given.isprintable()) or " " in given:
        raise UsageError("the key for the server holds characters that an HTTP header cannot carry")
    with contextlib.suppress(ShakedownError):  # none, or none that only this user knows
        if read_secret(path) == given or not given:
            return
    with storage_errors("write", path):
        private.make_folders(path.parent)
        # Removed, not overwritten: whoever made that file may have it open.
        path.unlink(missing_ok=True)
        private.write_secret(path, f"{given or secrets.token_urlsafe(32)}\n".encode("ascii"))


def bearer(api_key: str) -> dict[str, str]:
    """The header that carries a key; none for an empty one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def read_secret(path: Path) -> str:
    """Read a secret that this user wrote and nobody else can read or write.

    Raises:
        UntrustedError: another user could have written it or can read it.
        UsageError: there is none.
    """
    hint = "shakedown serve start --config FILE --out FOLDER, as the user who uses the server"
    try:
        text = private.read_secret(path).decode("ascii", "replace").strip()
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot read the server's secret {path}: {reason}", hint=hint) from error
    if not text:
        raise UsageError(f"the server's secret {path} is empty", hint=hint)
    return text
