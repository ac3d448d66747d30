"""Reading assets.json: what later stages are given as model and data."""

from pathlib import Path

from shakedown.commands.assets import DEMO, SCHEMA, Assets, resolved_source
from shakedown.config import Config
from shakedown.core.errors import UsageError
from shakedown.core.files import read_object
from shakedown.core.paths import RunPaths


def read_assets(path: Path) -> Assets:
    """Read what `shakedown assets` wrote.

    Raises:
        UsageError: missing, not JSON, or not of this schema.
    """
    hint = f"shakedown assets --config CONFIG --out {path.parent}"
    body = read_object(path, "assets", schema=SCHEMA, hint=hint)
    try:
        return Assets(**body)
    except TypeError as error:
        raise UsageError(f"{path} is not complete: {error}", hint=hint) from error


def heldout_source(config: Config) -> str:
    """The held-out rows of a run; the demo's lie where `shakedown assets` wrote them.

    Raises:
        UsageError: the demo's rows were not written yet.
    """
    if config.data.heldout != DEMO:
        return resolved_source(config, config.data.heldout, heldout=True)
    folder = RunPaths(Path(config.results) / config.run).assets
    return read_assets(folder / "assets.json").heldout
