"""Fingerprint: the common properties of a checkpoint and the job that resumes from it."""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shakedown.cluster.allocation import parse_allocation
from shakedown.config import GrpoConfig, OptimizerConfig, SftConfig
from shakedown.core.folders import storage_errors
from shakedown.core.model_folder import TOKENIZERS
from shakedown.core.provenance import Contents, differing, source_files
from shakedown.data_sources import parse_source
from shakedown.training.stage.job import StageJob

_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
_TEMPLATE = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")

# May change between attempts, and the log says so: they shape the updates to come, and nothing of
# what a checkpoint holds (weights, moments, random states, the place in the data, the rollouts that
# wait). AdamW's betas do: the moments are means with them.
_TOLD = frozenset(
    {
        "steps",
        "heldout",
        *(f"optimizer.{key}" for key in ("lr", "warmup_steps", "weight_decay", "max_grad_norm")),
        *(f"optimizer.{key}" for key in ("schedule", "decay_steps", "min_lr_ratio")),
        *(f"grpo.{key}" for key in ("clip_low", "clip_high", "epochs", "advantage", "loss_level")),
        *(f"grpo.{key}" for key in ("drop_flat_groups", "decoupled", "tis_cap", "kl_coef")),
        *(f"grpo.{key}" for key in ("entropy_coef", "async_level", "group_size", "max_tokens")),
        *(f"grpo.{key}" for key in ("ratio", "mask_truncated", "overlong_tokens")),
        *(f"grpo.{key}" for key in ("partial_rollouts", "refill_flat_groups")),
    }
)

# Keys of grpo that may change between attempts: they do not change what is learned.
_FREE = frozenset(
    {"batch_timeout", "weight_update_timeout", "agent_timeout", "max_concurrent", "record", "drift"}
)

# Names that came later and have no default, or that not every job has: a checkpoint that has none
# of it stays usable.
_LATER = frozenset({"engine", "tokenizer", "chat_template", "reward_source", "agent_source"})

# Digests of earlier releases, which are not of whole files: they say nothing about ours.
_DIGESTS = frozenset({"model", "data", "replay"})
_SAMPLED = re.compile(r"(?:\w+=)?[0-9a-f]{16}")


def fingerprint(job: StageJob) -> dict[str, str]:
    """Digests and values by name. The number of ranks, faults and limits may differ.

    Raises:
        StorageError: the model, the data or own code cannot be read.
    """
    return _fingerprint(job, Contents(job.paths.contents))


def keep_digests(job: StageJob) -> dict[str, str]:
    """The fingerprint; what was read for it is not read again by the stage's other processes.

    Raises:
        StorageError: as `fingerprint`; or the run's folder cannot be written.
    """
    contents = Contents(job.paths.contents)
    found = _fingerprint(job, contents)
    contents.keep()
    return found


def _fingerprint(job: StageJob, contents: Contents) -> dict[str, str]:
    config = job.config
    parts: dict[str, Any] = {
        "engine": parse_allocation(config.allocation).parts[0].backend,
        **_contents(job, contents),
        "dtype": job.dtype,
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
    if config.algorithm == "sft":
        sft = (config.sft or SftConfig()).model_dump(mode="json")
        parts |= {f"sft.{k}": v for k, v in sft.items()}
    if job.chat_template_kwargs:
        parts["chat_template_kwargs"] = dict(job.chat_template_kwargs)
    if job.replay:
        with storage_errors("read", Path(job.replay)):
            parts["replay"] = contents.digest(Path(job.replay).glob("step_*.npz"))
    return {name: _text(value) for name, value in parts.items()}


def _contents(job: StageJob, contents: Contents) -> dict[str, str]:
    """Digests of the files that are read; a hub's data and missing code count by their names."""
    folder = Path(job.model)
    tokenizer = _matching(folder, (*TOKENIZERS, *_TOKENIZER))
    template = _matching(folder, _TEMPLATE)
    rest = _matching(folder, ("*.json", "*.safetensors", "*.bin")) - tokenizer - template
    found = {"data": _data_digest(job.train, contents)}
    with storage_errors("read", folder):
        found["chat_template"] = contents.digest(template)
        found["tokenizer"] = contents.digest(tokenizer)
        found["model"] = contents.digest(rest)
    if job.config.eval_samples and job.heldout:
        found["heldout"] = _data_digest(job.heldout, contents)
    agent = job.config.grpo.agent if job.config.grpo else ""
    for name, target in (("reward", job.reward), ("agent", agent)):
        with storage_errors("read", Path(target.rpartition(":")[0])):
            if sources := source_files(target):
                found[f"{name}_source"] = contents.digest(sources)
    return found


def _matching(folder: Path, patterns: Iterable[str]) -> set[Path]:
    return {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}


def differences(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> list[str]:
    """The mismatches, one text for each name, for a person to read.

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
    changed = differing(known(theirs), ours)
    return {name: both for name, both in changed.items() if name in _TOLD}


def known(theirs: Mapping[str, Any]) -> dict[str, str]:
    """A checkpoint's account with what it means by names that came after it."""
    return {**_absent(), **{name: str(value) for name, value in theirs.items()}}


def shaping(made: Mapping[str, str]) -> dict[str, str]:
    """The settings that shape past steps: at a constant rate, more steps do not change them."""
    constant = made.get("optimizer.schedule", "constant") == "constant"
    return {name: value for name, value in made.items() if not constant or name != "steps"}


def _same(name: str, ours: Mapping[str, str], theirs: Mapping[str, Any]) -> bool:
    if name not in theirs:
        return name in _LATER or ours[name] == _absent().get(name)
    if name not in ours:  # code that is not found here: whoever imports it says so
        return name in _LATER or name.removeprefix("grpo.") in _FREE
    if name in _DIGESTS and _SAMPLED.fullmatch(str(theirs[name])):
        return True
    return bool(ours[name] == theirs[name])


@functools.cache
def _absent() -> Mapping[str, str]:
    """The value that a checkpoint implies for a name that is newer than itself.

    A new key of these sections is added with a default that does what was done before.
    """
    defaults = {
        # lr has no default: any value makes the section, and it is left out.
        "optimizer": OptimizerConfig(lr=1.0).model_dump(mode="json", exclude={"lr"}),
        "grpo": GrpoConfig().model_dump(mode="json"),
        "sft": SftConfig().model_dump(mode="json"),
    }
    return {
        f"{section}.{key}": _text(value)
        for section, values in defaults.items()
        for key, value in values.items()
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _data_digest(source: str, contents: Contents) -> str:
    parsed = parse_source(source)
    if parsed.hub:  # streamed: there is no file to read, so its name stands for it
        return source
    with storage_errors("read", Path(parsed.place)):
        digest = contents.digest([Path(parsed.place)])
    return f"{parsed.form}={digest}" if parsed.form else digest
