"""Reading assets.json: what later stages are given as model and data."""

import json
from pathlib import Path

from shakedown.commands.assets import SCHEMA, Assets
from shakedown.errors import UsageError


def read_assets(path: Path) -> Assets:
    """Read what `shakedown assets` wrote.

    Raises:
        UsageError: missing, not JSON, or not of this schema.
    """
    hint = f"shakedown assets --config CONFIG --out {path.parent}"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read assets {path}: {error.strerror}", hint=hint) from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", hint=hint) from error
    if not isinstance(body, dict) or body.pop("schema", None) != SCHEMA:
        raise UsageError(f'{path} is no assets file: expected "schema": "{SCHEMA}"', hint=hint)
    try:
        return Assets(**body)
    except TypeError as error:
        raise UsageError(f"{path} is not complete: {error}", hint=hint) from error
