"""Models that the rules here do not cover, by NVIDIA's megatron-bridge, where that is installed.

Its package is only imported for such a model. It brings Megatron's configuration of the model and
moves the weights; that the result computes what transformers does is checked by the engine.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from shakedown.core.errors import ConfigError
from shakedown.training.engines import FAMILIES

_MODULE = "megatron.bridge"
# Not to be installed with their dependencies: those name an older transformers than is used here.
_INSTALL = (
    "train it with fsdp:dN, or: pip install --no-deps megatron-bridge; pip install omegaconf "
    "hydra-core transformer-engine[pytorch]"
)
# What it and Megatron are seen to raise for a model that they do not fit; NameError for layers of a
# Transformer Engine that is not installed.
REFUSALS = (
    AssertionError,
    AttributeError,
    KeyError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Provider(Protocol):
    """megatron-bridge's GPTModelProvider: a TransformerConfig that also makes the model."""

    def finalize(self) -> None:
        """Derive the configuration's other fields after some were set."""

    def provide_distributed_model(
        self, *, wrap_with_ddp: bool, use_cpu_initialization: bool, bf16: bool, fp16: bool
    ) -> list[Any]:
        """(collective) This rank's model, in one part."""


class Bridge(Protocol):
    """An object of megatron-bridge's AutoBridge, as far as it is used here."""

    def to_megatron_provider(self, load_weights: bool = True) -> Provider:
        """The configuration of the Megatron model."""

    def load_hf_weights(self, model: list[Any]) -> Any:
        """(collective) Fill this rank's model from the folder."""

    def export_hf_weights(
        self, model: list[Any], cpu: bool = False, show_progress: bool = True
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """(collective) Whole Hugging Face weights, on every rank."""


def needs_bridge(config: Any) -> bool:
    """Whether a Hugging Face config is of a model type that no rule here covers."""
    return getattr(config, "model_type", None) not in FAMILIES


def open_bridge(folder: Path, config: Any) -> Bridge:
    """megatron-bridge's view of a Hugging Face folder.

    Raises:
        ConfigError: it is not installed, cannot be imported, or does not know the model.
    """
    kind = f"model type {getattr(config, 'model_type', None)!r}"
    known = f"the megatron engine's own rules cover {', '.join(FAMILIES)}, not {kind}"
    try:
        auto: Any = importlib.import_module(_MODULE).AutoBridge
    except ModuleNotFoundError as error:
        if error.name != _MODULE:  # megatron-bridge is there, and a package that it imports is not
            raise _broken(known, error) from error
        raise ConfigError(
            f"{known}; megatron-bridge knows more, but is not installed", hint=_INSTALL
        ) from error
    except (ImportError, AttributeError, RuntimeError) as error:
        raise _broken(known, error) from error
    try:
        return cast(Bridge, auto.from_hf_pretrained(str(folder)))
    except REFUSALS as error:
        raise refusal(known, error) from error


def configured(bridge: Bridge, settings: Mapping[str, Any]) -> Provider:
    """The provider with these fields of TransformerConfig and of its own set.

    Raises:
        ConfigError: a field that it does not have, or values that do not go together.
    """
    try:
        provider = bridge.to_megatron_provider(load_weights=False)
        # A dataclass takes any new attribute without a word: a field that another release has
        # renamed would have no effect.
        unknown = sorted(name for name in settings if not hasattr(provider, name))
        if unknown:
            raise AttributeError(f"its provider has no {', '.join(unknown)}")
        for name, value in settings.items():
            setattr(provider, name, value)
        provider.finalize()
    except REFUSALS as error:
        raise refusal("cannot describe the model to Megatron", error) from error
    return provider


def fill(bridge: Bridge, model: Any) -> None:
    """(collective) Load the folder's weights into this rank's model.

    Raises:
        ConfigError: a weight does not fit, or a weight of the model is filled by nothing.
    """
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(torch.nan)  # megatron-bridge only warns of a weight that it does not know
    try:
        bridge.load_hf_weights([model])
    except REFUSALS as error:
        raise refusal("cannot load the weights", error) from error
    unfilled = [name for name, value in model.named_parameters() if value.isnan().any()]
    if unfilled:
        raise ConfigError(
            f"megatron-bridge left {len(unfilled)} weights unfilled or NaN: "
            f"{', '.join(unfilled[:3])}",
            hint="train it with fsdp:dN",
        )


def whole_weights(bridge: Bridge, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(collective) The Hugging Face weights on the CPU, one after the other, on every rank; each
    rank has to take all of them.
    """
    yield from bridge.export_hf_weights([model], cpu=True, show_progress=False)


def refusal(what: str, error: Exception) -> ConfigError:
    """megatron-bridge's own words, shortened to the lines that say something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = "; ".join(lines[:3]) or type(error).__name__
    return ConfigError(f"{what}: megatron-bridge says: {told}", hint="train it with fsdp:dN")


def _broken(known: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{known}; megatron-bridge is installed, but cannot be imported: {error}", hint=_INSTALL
    )
