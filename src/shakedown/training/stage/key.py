"""The key of an attempt, by which its ranks tell what rank 0 wrote from what a stranger wrote.

Every attempt has one of its own, so what was signed in one is nothing in the next.
"""

import secrets
from pathlib import Path

from shakedown.core.errors import UsageError
from shakedown.core.folders import storage_errors
from shakedown.core.private import read_secret, write_secret

_BYTES = 32  # as many as the SHA-256 that it goes into (RFC 2104)


def write_key(path: Path) -> None:
    """Draw a key and write it into a new file that only this user can read.

    Raises:
        StorageError: it cannot be written, or there is something of that name.
    """
    with storage_errors("write", path):
        write_secret(path, secrets.token_bytes(_BYTES))


def read_key(path: Path) -> bytes:
    """Read what `write_key` wrote.

    Raises:
        UntrustedError: another user could have written it or can read it.
        UsageError: it is missing or of another size.
    """
    hint = "shakedown train STAGE --config FILE, which draws a key for each attempt"
    try:
        key = read_secret(path)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot read the attempt's key {path}: {reason}", hint=hint) from error
    if len(key) != _BYTES:
        found = f"expected {_BYTES} bytes, got {len(key)}"
        raise UsageError(f"{path} is no key of an attempt: {found}", hint=hint)
    return key
