"""What a checkpoint and the job that wants to go on from it must have in common."""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shakedown.cluster.allocation import parse_allocation
from shakedown.config import GrpoConfig, OptimizerConfig
from shakedown.core.folders import storage_errors
from shakedown.data_sources import parse_source
from shakedown.training.stage.job import StageJob

# Of a large file only the beginning and the end are read: a header, and what changed last.
_SAMPLE = 1 << 20

# May change between attempts, and the log says so: they shape the updates to come, and nothing of
# what a checkpoint holds (weights, moments, random states, the place in the data, the rollouts that
# wait). AdamW's betas do: the moments are means with them.
_TOLD = frozenset(
    {
        "steps",
        *(f"optimizer.{key}" for key in ("lr", "warmup_steps", "weight_decay", "max_grad_norm")),
        *(f"optimizer.{key}" for key in ("schedule", "decay_steps", "min_lr_ratio")),
        *(f"grpo.{key}" for key in ("clip_low", "clip_high", "epochs", "advantage", "loss_level")),
        *(f"grpo.{key}" for key in ("drop_flat_groups", "decoupled", "tis_cap", "kl_coef")),
        *(f"grpo.{key}" for key in ("entropy_coef", "async_level", "group_size", "max_tokens")),
        *(f"grpo.{key}" for key in ("ratio", "mask_truncated", "overlong_tokens")),
        "grpo.partial_rollouts",
    }
)

# Keys of grpo that may change between attempts: they do not change what is learned.
_FREE = frozenset(
    {"batch_timeout", "weight_update_timeout", "agent_timeout", "max_concurrent", "record", "drift"}
)

# Names that came later and have no default: a checkpoint that has none of it stays usable.
_LATER = frozenset({"engine"})


def fingerprint(job: StageJob) -> dict[str, str]:
    """Digests and values by name. The number of ranks, faults and limits may differ.

    Raises:
        StorageError: the model or the data cannot be read.
    """
    config = job.config
    parts: dict[str, Any] = {
        "engine": parse_allocation(config.allocation).parts[0].backend,
        "model": _folder_digest(Path(job.model)),
        "dtype": job.dtype,
        "data": _data_digest(job.train),
        "reward": job.reward,
        "seed": job.seed,
        "algorithm": config.algorithm,
        "batch_size": config.batch_size,
        "steps": config.steps,
        **{f"optimizer.{k}": v for k, v in config.optimizer.model_dump(mode="json").items()},
    }
    if config.grpo is not None:
        grpo = config.grpo.model_dump(mode="json")
        parts |= {f"grpo.{k}": v for k, v in grpo.items() if k not in _FREE}
    if job.replay:
        with storage_errors("read", Path(job.replay)):
            parts["replay"] = _digest(sorted(Path(job.replay).glob("step_*.npz")))
    return {name: _text(value) for name, value in parts.items()}


def differences(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> list[str]:
    """What has to match and does not, one text for each name, for a person to read.

    A key that came after their checkpoint was written matches while it has its default; one that
    may change by now is passed over.
    """
    names = dict.fromkeys([*ours, *theirs])
    return [
        f"{name}: {theirs.get(name, 'nothing')} there, {ours.get(name, 'nothing')} here"
        for name in names
        if name not in _TOLD and not _same(name, ours, theirs)
    ]


def changes(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Settings that may change and have: by name their value there, and here."""
    known = {**_absent(), **theirs}
    return {
        name: (str(known[name]), ours[name])
        for name in ours
        if name in _TOLD and name in known and known[name] != ours[name]
    }


def _same(name: str, ours: Mapping[str, str], theirs: Mapping[str, Any]) -> bool:
    if name not in theirs:
        return name in _LATER or ours[name] == _absent().get(name)
    if name not in ours:
        return name.removeprefix("grpo.") in _FREE
    return bool(ours[name] == theirs[name])


@functools.cache
def _absent() -> Mapping[str, str]:
    """What a checkpoint means by a name that it does not have, as the key came after it.

    A new key of these sections is added with a default that does what was done before.
    """
    defaults = {
        # lr has no default: any value makes the section, and it is left out.
        "optimizer": OptimizerConfig(lr=1.0).model_dump(mode="json", exclude={"lr"}),
        "grpo": GrpoConfig().model_dump(mode="json"),
    }
    return {
        f"{section}.{key}": _text(value)
        for section, values in defaults.items()
        for key, value in values.items()
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _folder_digest(folder: Path) -> str:
    with storage_errors("read", folder):
        files = [*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.bin")]
        return _digest(sorted(files))


def _data_digest(source: str) -> str:
    parsed = parse_source(source)
    if parsed.hub:  # streamed: there is no file to read, so its name stands for it
        return source
    with storage_errors("read", Path(parsed.place)):
        digest = _digest([Path(parsed.place)])
    return f"{parsed.form}={digest}" if parsed.form else digest


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_SAMPLE))
            stream.seek(max(0, size - _SAMPLE))
            digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:16]
