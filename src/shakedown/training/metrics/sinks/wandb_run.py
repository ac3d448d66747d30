"""Weights & Biases: one run a stage, which a resumed attempt continues.

Its own variables rule: WANDB_MODE (offline), WANDB_PROJECT, WANDB_ENTITY, WANDB_BASE_URL. The key
comes from WANDB_API_KEY or ~/.netrc and is never written or passed on here.
"""

import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shakedown.core.errors import ConfigError, UsageError
from shakedown.core.files import read_object, write_json
from shakedown.training.stage.job import StageJob

_WITHOUT_SERVER = ("offline", "disabled", "dryrun")
_FINISH_SECONDS = "20"
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbRun:
    """The run's id is in the stage's folder. wandb skips steps that the run has already
    seen: after a resume they are the same numbers.
    """

    def __init__(self, job: StageJob) -> None:
        self._job = job
        self._run: Any = None

    def begin(self, done: int) -> None:
        import wandb

        # Its own default waits without end for a network that is gone: that would look like a hang.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", _FINISH_SECONDS)
        job = self._job
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "shakedown",
            name=f"{job.paths.root.parent.parent.name}-{job.stage}",
            id=run_id(job.paths.wandb, fresh=done == 0),
            resume="allow",
            dir=str(job.paths.root),  # not beside the logs, which the diagnosis reads
            config={**job.config.model_dump(mode="json"), "seed": job.seed, "dtype": job.dtype},
            # The ranks' logs are kept here; their text is not sent anywhere.
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, quiet=True),
        )

    def append(self, row: Mapping[str, float]) -> None:
        values = {name: value for name, value in row.items() if name != "step"}
        self._run.log(values, step=int(row["step"]))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def run_id(path: Path, *, fresh: bool) -> str:
    """The id of the stage's run; a new one when the stage starts anew or the file is damaged."""
    if not fresh:
        try:
            found = read_object(path, "wandb run").get("id")
        except UsageError:
            found = None
        if isinstance(found, str) and found.isalnum() and len(found) <= 64:
            return found
    made = secrets.token_hex(4)
    write_json(path, {"id": made})
    return made


def require_settings() -> None:
    """Refuse a wandb that would ask for a key at a terminal that nobody looks at.

    Raises:
        ConfigError: neither offline nor with a key.
    """
    if os.environ.get("WANDB_MODE") in _WITHOUT_SERVER or any(os.environ.get(k) for k in _KEYS):
        return
    base = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    host = urlsplit(base).hostname or ""
    if not _in_netrc(host):
        raise ConfigError(
            f"sinks: wandb has no key for {host}: neither WANDB_API_KEY nor ~/.netrc has one",
            hint="wandb login, or set WANDB_MODE=offline and `wandb sync` later",
        )


def _in_netrc(host: str) -> bool:
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
