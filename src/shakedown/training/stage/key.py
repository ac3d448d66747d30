"""The key of an attempt, by which its ranks tell what rank 0 wrote from what a stranger wrote.

Every attempt has one of its own, so what was signed in one is nothing in the next.
"""

import os
import secrets
import stat
from pathlib import Path

from shakedown.core.errors import UsageError
from shakedown.core.folders import storage_errors

_BYTES = 32  # as many as the SHA-256 that it goes into (RFC 2104)


def write_key(path: Path) -> None:
    """Draw a key and write it into a new file that only this user can read.

    Raises:
        StorageError: it cannot be written, or there is something of that name.
    """
    with storage_errors("write", path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as stream:
            stream.write(secrets.token_bytes(_BYTES))


def read_key(path: Path) -> bytes:
    """Read what `write_key` wrote.

    Raises:
        UsageError: it is missing, a link, another user's, open to others or of another size.
    """
    hint = "shakedown train STAGE --config FILE, which draws a key for each attempt"
    try:
        # O_NONBLOCK: a FIFO in its place would be waited for without end.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as stream:
            found = os.fstat(handle)
            key = stream.read(_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot read the attempt's key {path}: {reason}", hint=hint) from error
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid() or mode & 0o077 or len(key) != _BYTES:
        raise UsageError(
            f"{path} is no key of an attempt: expected {_BYTES} bytes of user {os.geteuid()}, "
            f"closed to others; got {found.st_size} bytes of user {found.st_uid}, mode {mode:04o}",
            hint=hint,
        )
    return key
