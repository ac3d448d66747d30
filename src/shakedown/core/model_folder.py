"""Checks of a Hugging Face folder's files, before anything is started.

Engines report such faults late or never: vLLM fills a layer that is narrower than its weights with
a part of them, and answers. Only headers are read, without torch or transformers.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shakedown.core.errors import UsageError
from shakedown.core.files import is_count, read_object

# Files that hold a tokenizer of transformers, SentencePiece, tiktoken or Mistral, or the code of
# one.
TOKENIZERS = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "token*.py",
)
# Dense families with the same names for tensors and sizes; others are left to the engines.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
# Where head_dim is missing these use hidden_size / num_attention_heads; the others use their own
# number.
_PLAIN_HEADS = ("llama", "mistral", "qwen2")
_POSITIVE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_KINDS = (
    "architectures",
    "model_type",
    *_POSITIVE[:-1],
)  # the longest sequence is not a loaded tensor
# Beside vision, the language model has a prefix; a vision tower has layers of its own.
_TENSOR = re.compile(
    r"(?:model\.|language_model\.)*(?:layers\.(?P<layer>\d+)\.)?"
    r"(?P<name>(?:mlp|self_attn)\.\w+_proj\.weight|embed_tokens\.weight|lm_head\.weight)"
)
_LONGEST_HEADER = 100_000_000  # safetensors' own limit, in bytes
_POINTER = b"version https://git-lfs"

TensorShape = tuple[int, ...]


def check_tokenizer(folder: Path) -> None:
    """Refuse a model folder without a tokenizer.

    Raises:
        UsageError: which files are missing.
    """
    if not any(True for pattern in TOKENIZERS for _ in folder.glob(pattern)):
        raise UsageError(
            f"{folder} has no tokenizer: no tokenizer.json (nor vocab.json or *.model)",
            hint="copy tokenizer.json, tokenizer_config.json and the chat template from the model "
            "that it was trained from",
        )


def check_sizes(folder: Path) -> None:
    """Refuse a folder whose config.json has sizes that are impossible or differ from its weights.

    Raises:
        UsageError: which sizes, or which weights file is truncated or not safetensors.
    """
    body = read_object(folder / "config.json", "model config")
    text = body.get("text_config")
    config = text if isinstance(text, dict) else body
    # Quantised weights are packed: their shapes are not the layers'.
    if config.get("model_type") not in _FAMILIES or "quantization_config" in body:
        return
    wrong = _impossible(config)
    if not wrong:
        shapes = _shapes(folder)
        wrong = [*_misfits(config, shapes), *_layers(config, shapes)]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UsageError(
            f"{folder / 'config.json'}: {wrong[0]}{more}",
            hint="take config.json and *.safetensors from the same checkpoint",
        )


def differences(served: Path, given: Path) -> list[str]:
    """Reasons why one folder's weights cannot be loaded into the other's model; empty if they can.

    Raises:
        UsageError: a file of either cannot be read.
    """
    found = list(_other_config(_text_config(served), _text_config(given)))
    had, has = _shapes(served), _shapes(given)
    if not had or not has:  # only a config, or weights in another format
        return found
    # Tied to the input embeddings, it may be missing from the files.
    names = {name for name in had.keys() ^ has.keys() if not name.endswith("lm_head.weight")}
    found += [_only(name, had, has) for name in sorted(names)]
    both = (name for name in sorted(had.keys() & has.keys()) if had[name] != has[name])
    return found + [f"{name} is {_size(had[name])} there, {_size(has[name])} here" for name in both]


def _other_config(had: Mapping[str, Any], has: Mapping[str, Any]) -> Iterator[str]:
    for key in _KINDS:
        there, here = had.get(key), has.get(key)
        if there is not None and here is not None and there != here:
            yield f"{key} is {there!r:.80} there, {here!r:.80} here"


def _only(name: str, had: Mapping[str, TensorShape], has: Mapping[str, TensorShape]) -> str:
    return (
        f"{name} ({_size(had[name])}) is missing"
        if name in had
        else (f"{name} ({_size(has[name])}) is not in the model")
    )


def _size(shape: TensorShape) -> str:
    return " x ".join(map(str, shape))


def _text_config(folder: Path) -> dict[str, Any]:
    """The config of the language model, with the architecture of the whole."""
    body = read_object(folder / "config.json", "model config")
    text = body.get("text_config")
    return {**body, **text} if isinstance(text, dict) else body


def _impossible(config: Mapping[str, Any]) -> list[str]:
    """Sizes that no model can have, whatever its weights."""
    found = [
        f"{key} is {config[key]!r}, expected a positive number"
        for key in _POSITIVE
        if config.get(key) is not None and not (is_count(config[key]) and config[key])
    ]
    if found:
        return found
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and groups and heads % groups:
        found.append(
            f"{heads} num_attention_heads is not a multiple of {groups} num_key_value_heads"
        )
    hidden = config.get("hidden_size")
    if hidden and heads and hidden % heads and _head_size(config) is None:
        found.append(f"hidden_size {hidden} is not a multiple of {heads} num_attention_heads")
    return found


def _head_size(config: Mapping[str, Any]) -> int | None:
    """The size of one attention head; None if the config does not say."""
    if config.get("head_dim"):
        return int(config["head_dim"])
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if config.get("model_type") not in _PLAIN_HEADS or not heads or not hidden:
        return None
    return int(hidden // heads) if hidden % heads == 0 else None


def _misfits(config: Mapping[str, Any], shapes: Mapping[str, TensorShape]) -> Iterator[str]:
    """Tensors whose shapes differ from the config."""
    wanted = _wanted(config)
    for name, shape in shapes.items():
        found = _TENSOR.fullmatch(name)
        sizes = wanted.get(found["name"].split(".")[-2], ()) if found else ()
        for (key, size), have in zip(sizes, shape, strict=False):
            if size is not None and size != have:
                yield f"{key} is {size}, but {name} is of {' x '.join(map(str, shape))}"
                break


def _wanted(config: Mapping[str, Any]) -> dict[str, Sequence[tuple[str, int | None]]]:
    """For each module, by name, and each dimension of its weight: the config keys and their size.

    None: the config does not say.
    """
    head, heads = _head_size(config), config.get("num_attention_heads")
    groups = config.get("num_key_value_heads")
    hidden = ("hidden_size", config.get("hidden_size"))
    columns = ("intermediate_size", config.get("intermediate_size"))
    words = ("vocab_size", config.get("vocab_size"))
    query = ("num_attention_heads x head_dim", head * heads if head and heads else None)
    key = ("num_key_value_heads x head_dim", head * groups if head and groups else None)
    return {
        "embed_tokens": (words, hidden),
        "lm_head": (words, hidden),
        "gate_proj": (columns, hidden),
        "up_proj": (columns, hidden),
        "down_proj": (hidden, columns),
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
    }


def _layers(config: Mapping[str, Any], shapes: Mapping[str, TensorShape]) -> Iterator[str]:
    """Weights with more or fewer layers than the config says."""
    numbers = {
        int(found["layer"])
        for name in shapes
        if (found := _TENSOR.fullmatch(name)) and found["layer"]
    }
    said = config.get("num_hidden_layers")
    if numbers and said and len(numbers) != said:
        yield f"num_hidden_layers is {said}, but there are weights of {len(numbers)} layers"


def _shapes(folder: Path) -> dict[str, TensorShape]:
    """Shapes of all tensors of the folder's *.safetensors by name.

    Raises:
        UsageError: a file cannot be read, is truncated, or is not safetensors.
    """
    found: dict[str, TensorShape] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= _header(path)
    return found


def _header(path: Path) -> dict[str, TensorShape]:
    """Shapes by name as a file's header says: https://huggingface.co/docs/safetensors, "Format"."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if _POINTER.startswith(start) and start:
                raise _damaged(path, "it is a Git LFS pointer", "git lfs pull")
            if length > min(_LONGEST_HEADER, size - 8):
                raise _damaged(path, f"{size} bytes are not a whole safetensors file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        shapes = {name: tuple(map(int, each["shape"])) for name, each in header.items()}
        end = 8 + length + max((each["data_offsets"][1] for each in header.values()), default=0)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise _damaged(path, "its header is not a safetensors header") from error
    if end > size:
        raise _damaged(path, f"it has {size} bytes, its header says {end}")
    return shapes


def _damaged(path: Path, why: str, remedy: str = "fetch or copy it again") -> UsageError:
    return UsageError(f"{path} is cut off or damaged: {why}", hint=remedy)
