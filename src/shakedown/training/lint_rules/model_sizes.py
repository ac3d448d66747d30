"""Sizes of a model from its folder's config.json, read as hostile: bounded, no code run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakedown.core.errors import CannotJudgeError, UsageError
from shakedown.core.model_folder import check_sizes, check_tokenizer
from shakedown.training.assets import DEMO
from shakedown.training.demo import CHARACTERS, MODEL, SPECIALS
from shakedown.training.forecast.decoder import Decoder, read_decoder

_TEMPLATES = "additional_chat_templates"  # a folder of them (transformers)
_LONGEST = 1 << 22  # bytes of a config.json; real ones have a few thousand
_WEIGHTS = ("*.safetensors", "*.bin")  # as models/huggingface.py asks for
# Keys by which configs say that a layer has experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Their `max_position_embeddings` is what the scaled positions reach (vLLM, config/model.py).
_SCALED_ALREADY = ("default", "su", "longrope", "llama3", "deepseek_llama_scaling")
# Of the model that `shakedown assets` writes.
_DEMO_BODY = {
    "model_type": "qwen3",
    **MODEL,
    "vocab_size": len(SPECIALS) + len(CHARACTERS),
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes in config.json; None where one is absent, or not a positive number.

    Attributes:
        kind: `model_type`; of a model with images that of the whole.
        positions: longest sequence, the largest that its RoPE scaling can mean.
        ffn: columns of the MLP.
        router_loss: config.json asks for the loss that balances experts.
        fault: why the folder cannot be used; then nothing else is known.
    """

    kind: str = ""
    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    ffn: int | None = None
    positions: int | None = None
    experts: bool = False
    router_loss: bool = False
    quantised: bool = False
    fault: str = ""


def demo_sizes() -> ModelSizes:
    """The sizes of the model that `shakedown assets` writes."""
    return _sizes(_DEMO_BODY)


def read_sizes(folder: Path) -> ModelSizes | None:
    """The sizes of a local folder; None where there is none: a name on the hub is not looked up."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    body = _body(path)
    if isinstance(body, str):
        return ModelSizes(fault=body)
    why = _unusable(folder)
    return ModelSizes(fault=why) if why else _sizes(body)


def decoder_of(source: str) -> Decoder:
    """The decoder of `model.source`, by config.json alone: no weights need to be there.

    Raises:
        CannotJudgeError: no config.json here, or one that cannot be planned with.
    """
    if source == DEMO:
        return read_decoder(_DEMO_BODY, DEMO)
    path = Path(source) / "config.json"
    if not path.is_file():
        raise CannotJudgeError(
            f"model {source}: no {path} on this machine, which sizes are planned by",
            hint="name a folder that holds the model's config.json: --model DIR",
        )
    body = _body(path)
    if isinstance(body, str):
        raise CannotJudgeError(body, hint="take config.json from the model's folder")
    return read_decoder(body, str(path))


def known_decoder(source: str) -> Decoder | None:
    """The `decoder_of` the model; None if it cannot be planned with, or is not here."""
    try:
        return decoder_of(source)
    except CannotJudgeError:
        return None


def _body(path: Path) -> Mapping[str, Any] | str:
    """The content of a config.json, or why it cannot be used."""
    try:
        with path.open("rb") as stream:
            body = json.loads(stream.read(_LONGEST))
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    except (ValueError, RecursionError):
        return f"{path} is not JSON"
    if not isinstance(body, dict):
        return f"{path}: expected an object, got {type(body).__name__}"
    return body


def _unusable(folder: Path) -> str:
    """Why `shakedown assets` would refuse the folder, as far as names of files tell; else empty."""
    if not any(True for pattern in _WEIGHTS for _ in folder.glob(pattern)):
        return f"{folder} has no weights: no *.safetensors"
    try:
        check_tokenizer(folder)
        check_sizes(folder)
    except UsageError as error:
        return str(error)
    try:
        with (folder / "tokenizer_config.json").open("rb") as stream:
            tokenizer = json.loads(stream.read(_LONGEST))
    except OSError:
        return ""  # some tokenizers have none: they are for transformers to read
    except (ValueError, RecursionError):
        return f"{folder / 'tokenizer_config.json'} is not JSON"
    has = isinstance(tokenizer, dict) and tokenizer.get("chat_template")
    if has or (folder / "chat_template.jinja").exists() or (folder / _TEMPLATES).exists():
        return ""
    return f"{folder} has no chat template: use an instruction-tuned model, or add its .jinja file"


def _sizes(body: Mapping[str, Any]) -> ModelSizes:
    text = body.get("text_config")
    inner = text if isinstance(text, dict) else body
    kind = body.get("model_type")
    return ModelSizes(
        kind=kind if isinstance(kind, str) else "",
        heads=_number(inner, "num_attention_heads"),
        # Where it is left out each kind of model has a default of its own.
        kv_heads=_number(inner, "num_key_value_heads"),
        layers=_number(inner, "num_hidden_layers"),
        ffn=_number(inner, "intermediate_size"),
        positions=_positions(inner, kind),
        quantised="quantization_config" in body,
        experts=any((_number(inner, key) or 0) > 1 for key in _EXPERTS),
        router_loss=inner.get("output_router_logits") is True,
    )


def _number(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    return value if type(value) is int and value > 0 else None


def _positions(body: Mapping[str, Any], kind: object) -> int | None:
    """vLLM's rule; of YaRN, whose meaning changed between its releases, the longer reading."""
    known = _number(body, "max_position_embeddings")
    if known is None:
        return None
    longest = max(known, _number(body, "model_max_length") or 0)
    # Gemma 3's is scaled already, whatever its RoPE says.
    if "gemma3" in str(kind):
        return longest
    for rope in _ropes(body):
        factor = rope.get("factor")
        scaled = rope.get("rope_type", rope.get("type")) not in _SCALED_ALREADY
        if scaled and isinstance(factor, int | float) and 1 < factor < 1e6:
            original = _number(rope, "original_max_position_embeddings")
            longest = max(longest, int((original or known) * factor))
    return longest


def _ropes(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """`rope_scaling`, or since transformers 5 `rope_parameters`, there also one a kind of layer."""
    found = [body.get("rope_scaling"), body.get("rope_parameters")]
    found += [each for rope in found if isinstance(rope, dict) for each in rope.values()]
    return [rope for rope in found if isinstance(rope, dict)]
