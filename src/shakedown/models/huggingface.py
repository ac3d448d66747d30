"""Hugging Face folders: read a model, and write one with all files beside the weights."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from shakedown.core.errors import UsageError
from shakedown.core.files import write_text
from shakedown.core.folders import storage_errors
from shakedown.core.model_folder import check_sizes, check_tokenizer
from shakedown.core.private import make_folders


def _nobody_watches() -> None:
    """The default outside `beating`."""


_beat: ContextVar[Callable[[], None]] = ContextVar("beat", default=_nobody_watches)


@contextlib.contextmanager
def beating(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` for every tensor that this thread loads meanwhile."""
    token = _beat.set(beat)
    try:
        yield
    finally:
        _beat.reset(token)


def loaded() -> None:
    """Report that one more tensor is in memory."""
    _beat.get()()


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json")
_GENERATION = "generation_config.json"


def quiet() -> None:
    """Disable progress bars, as people and the hang diagnosis read a rank's log."""
    transformers_logging.disable_progress_bar()


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not a model folder, before anything slow is tried.

    Raises:
        UsageError: the folder, its config or its weights are missing.
    """
    if not folder.is_dir():
        raise UsageError(
            f"model folder {folder} does not exist",
            hint="write the demo's with `shakedown assets`, or set model.source",
        )
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is not a Hugging Face model folder: config.json is missing")
    if not any(True for pattern in _WEIGHTS[:2] for _ in folder.glob(pattern)):
        raise UsageError(f"{folder} is not a Hugging Face model folder: *.safetensors is missing")


def read_config(folder: Path) -> Any:
    """The model's configuration.

    Raises:
        UsageError: missing, of a kind that transformers cannot read, or its sizes differ from those
            of the weights.
    """
    check_folder(folder)
    check_sizes(folder)
    with _readable(folder, "config"):
        return AutoConfig.from_pretrained(folder, local_files_only=True)


def read_tokenizer(folder: Path) -> Any:
    """The model's tokenizer, with padding and an end-of-sequence token.

    Raises:
        UsageError: missing, unreadable, or without an end-of-sequence token.
    """
    check_folder(folder)
    check_tokenizer(folder)
    with _readable(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer of {folder} has no eos_token: answers could never end")
    # Padding is always masked, so any token will do.
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_tokens(folder: Path, tokenizer: Any) -> list[int]:
    """All tokens that end an answer: the tokenizer's, and those of generation_config.json.

    Chat models often end a turn with another token than the tokenizer's (Gemma's `<end_of_turn>`,
    Phi's `<|end|>`); inference servers stop at both.

    Raises:
        UsageError: generation_config.json cannot be read.
    """
    found = {int(tokenizer.eos_token_id)}
    if (folder / _GENERATION).is_file():
        with _readable(folder, "generation config"):
            named = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        found.update([named] if isinstance(named, int) else named or ())
    return sorted(found)


def read_model(folder: Path) -> Any:
    """The model on the CPU in float32, the form in which weights are trained.

    Raises:
        UsageError: missing, unreadable, or its weights do not fit its config.
    """
    check_folder(folder)
    with _readable(folder, "weights"):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    loaded()
    # transformers only warns about missing weights, and initialises them at random.
    if report["missing_keys"] or report["mismatched_keys"]:
        wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        listed = ", ".join(wrong[:3])
        raise UsageError(f"{folder}: {len(wrong)} weights are missing or misshapen: {listed}")
    return model


def without_noise(model: Any) -> Any:
    """Turn off the model's dropout and router jitter, in place, also for training.

    A policy's ratio compares log-probabilities of the same model: noise that the engine and the
    pass before the update do not have would move it away from 1. config.json is unchanged.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and re.search("dropout|pdrop|jitter", name):
                setattr(module, name, 0.0)
    return model


def empty_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model of that shape, with weights to be filled in."""
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def outline(config: Any) -> Any:
    """A model of that shape without memory, for writing given weights."""
    with torch.device("meta"):
        return empty_model(config)


def write_folder(
    model: Any, weights: Mapping[str, torch.Tensor], *, source: Path, folder: Path, dtype: str
) -> None:
    """Write weights into `folder` with config, tokenizer and the rest of `source`.

    Of tied weights only the one that transformers ties the others to is written.

    Args:
        model: from transformers, or another with a `save_pretrained` that takes a `state_dict`.

    Raises:
        StorageError: the folder cannot be written.
    """
    kind = getattr(torch, dtype)
    # In one dtype they share memory, which transformers notices; copies in another do not.
    tied = getattr(model, "all_tied_weights_keys", {})
    cast = {
        name: value.to(kind) if value.is_floating_point() else value
        for name, value in weights.items()
        if tied.get(name) not in weights
    }
    with storage_errors("write", folder):
        _copy_rest(source, folder)
        model.save_pretrained(folder, state_dict=cast)
        generation = source / _GENERATION
        if generation.is_file():  # a model made only from its config does not know it
            shutil.copyfile(generation, folder / _GENERATION)
        _tell_dtype(folder / "config.json", dtype)


def _tell_dtype(path: Path, dtype: str) -> None:
    """Put the weights' dtype into config.json, as the saved model computed in another."""
    if not path.is_file():
        return
    body = json.loads(path.read_text(encoding="utf-8"))
    for part in (body, *(part for part in body.values() if isinstance(part, dict))):
        for key in ("dtype", "torch_dtype"):
            if key in part or (part is body and key == "dtype"):
                part[key] = dtype
    write_text(path, json.dumps(body, indent=2) + "\n")


def _copy_rest(source: Path, folder: Path) -> None:
    """Copy contents only: with the modes of a shared source others could also write to the copy."""
    # `.*`: the hub's download cache, git's folder.
    left_out = shutil.ignore_patterns(*_WEIGHTS, ".*")
    for place, folders, files in os.walk(source, followlinks=True):
        skipped = left_out(place, folders + files)
        folders[:] = [name for name in folders if name not in skipped]
        target = folder / os.path.relpath(place, source)
        make_folders(target)
        for name in files:
            if name not in skipped:
                shutil.copyfile(Path(place, name), target / name)


@contextlib.contextmanager
def _readable(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    # The exception that transformers raises depends on which file is damaged.
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"cannot read the {what} of {folder}: {reason}") from error
