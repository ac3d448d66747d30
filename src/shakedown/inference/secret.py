"""A server's secret: a file of its owner alone, which the server and its clients read.

It is in no argument, environment or record, so that `ps`, logs, verdicts and reports cannot show
it; records name the file.
"""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from shakedown.core.errors import UsageError
from shakedown.core.folders import storage_errors

_LARGEST = 4096  # bytes


def make_secret(path: Path, given: str = "") -> None:
    """Write `given` or a drawn secret into a new file, unless a good one is there.

    A secret that is there stays: clients of the server's life before go on with it.

    Raises:
        UsageError: `given` cannot stand in a header.
        StorageError: the file cannot be written.
    """
    if not (given.isascii() and given.isprintable()) or " " in given:
        raise UsageError("VLLM_API_KEY holds characters that an HTTP header cannot carry")
    with contextlib.suppress(UsageError):
        if read_secret(path) == given or not given:
            return
    with storage_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Removed, not overwritten: whoever made that file may have it open.
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as stream:
            stream.write(f"{given or secrets.token_urlsafe(32)}\n")


def bearer(api_key: str) -> dict[str, str]:
    """The header that carries a key; none for an empty one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def read_secret(path: Path) -> str:
    """Read a secret that this user wrote and nobody else can read or write.

    Raises:
        UsageError: there is none, or it is another user's, a link, or open to others.
    """
    hint = "shakedown serve start --config FILE --out FOLDER, as the user who uses the server"
    try:
        # O_NONBLOCK: a FIFO in its place would hold the reader up.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as stream:
            found = os.fstat(handle)
            whole = stream.read(_LARGEST) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot read the server's secret {path}: {reason}", hint=hint) from error
    text = whole.decode("ascii", "replace").strip()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid() or mode & 0o077 or not text:
        raise UsageError(
            f"{path} is no server's secret: expected a file of user {os.geteuid()} that others "
            f"can neither read nor write, got one of user {found.st_uid}, mode {mode:04o}, "
            f"{found.st_size} bytes",
            hint=hint,
        )
    return text
