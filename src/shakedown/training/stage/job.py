"""The job of one attempt of a training stage: written by the supervisor, read by its parts."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shakedown.agents.reward_pool import RewardLimits
from shakedown.config import StageConfig, SupervisedStage
from shakedown.core.errors import UsageError
from shakedown.core.files import read_json_as, write_json
from shakedown.core.folders import storage_errors
from shakedown.core.lease import Fence
from shakedown.core.paths import AttemptPaths, StagePaths
from shakedown.core.private import read_own, read_secret, write_secret

_KEY_BYTES = 32  # the size of the SHA-256 that a key goes into (RFC 2104)


class SupervisedJob:
    """The job of a stage of any kind: `world_size` counts ranks; the attempt once it has begun."""

    stage: str
    config: SupervisedStage
    world_size: int
    stage_root: str
    attempt_root: str

    @property
    def paths(self) -> StagePaths:
        return StagePaths(Path(self.stage_root))

    @property
    def attempt(self) -> AttemptPaths:
        return AttemptPaths(Path(self.attempt_root))

    @property
    def fence(self) -> Fence:
        """The fence under which the attempt may write the stage's folder."""
        return Fence(self.paths.root, _number(self.attempt.fence))

    def write(self, path: Path) -> None:
        """Write the job atomically as JSON."""
        write_json(path, {**vars(self), "config": self.config.model_dump(mode="json")})


def _number(path: Path) -> int:
    """The number of the lease; 0 for an attempt begun without a supervisor."""
    try:
        return int(read_own(path))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} does not hold a lease number: {error}") from error


@dataclass(frozen=True)
class StageJob(SupervisedJob):
    """One stage of our own, and the attempt at it once that has begun (`attempt_root`).

    `model` is the input checkpoint (a Hugging Face folder); `train` and `heldout` are JSON-lines
    files or hub names; `world_size` counts trainer ranks; `endpoint` is the base URL of the stage's
    own inference server without `/v1` (GRPO only), with commas between those of several;
    `served_model` its model name, `engine` its kind and `replicas` the data-parallel ones of each.
    `reward_timeout` (s) and `reward_memory_gb` (GiB) bound one call of the reward function;
    `reward_failed_share` of all calls may fail.
    `replay`: a folder of recorded rollouts to train on instead of generating; empty: none.
    `drift_limits`: by metric, see `training.drift`. `chat_template_kwargs`: for the chat template,
    beside the messages.
    """

    stage: str
    config: StageConfig
    model: str
    dtype: str
    train: str
    heldout: str
    reward: str
    seed: int
    world_size: int
    stage_root: str
    attempt_root: str = ""
    endpoint: str = ""
    served_model: str = "policy"
    engine: str = "vllm"
    replicas: int = 1
    reward_timeout: float = RewardLimits.seconds
    reward_memory_gb: float = RewardLimits.memory_gb
    reward_failed_share: float = RewardLimits.failed_share
    replay: str = ""
    drift_limits: Mapping[str, float] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        """Whether the stage has an inference server and an orchestrator of its own."""
        return self.config.algorithm == "grpo" and not self.replay

    @property
    def reward_limits(self) -> RewardLimits:
        return RewardLimits(self.reward_timeout, self.reward_memory_gb, self.reward_failed_share)


def read_job(path: Path) -> StageJob:
    """Read a job file.

    Raises:
        UsageError: the file is missing or not a job.
    """
    return read_json_as(StageJob, path, "stage job")


def write_key(path: Path) -> None:
    """Draw an attempt's key and write it into a new file that only this user can read.

    By it ranks tell what rank 0 wrote from what a stranger wrote. Every attempt has its own, so
    nothing that was signed in one is valid in the next.

    Raises:
        StorageError: it cannot be written, or there is something of that name.
    """
    with storage_errors("write", path):
        write_secret(path, secrets.token_bytes(_KEY_BYTES))


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
    if len(key) != _KEY_BYTES:
        found = f"expected {_KEY_BYTES} bytes, got {len(key)}"
        raise UsageError(f"{path} is not a valid attempt key: {found}", hint=hint)
    return key
