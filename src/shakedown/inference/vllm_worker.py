"""A method for vLLM's worker process, through its own `--worker-extension-cls`.

vLLM's `reload_weights` is not enough on a CPU: there a layer computes with a packed copy of its
weight. Output embeddings that share the input embeddings' weight (tied models) are not loaded
themselves, so their packed copy stays the old one; the server answers 200 and mixes two versions
(seen with 0.32.0). Nor are the experts of a mixture packed again: their kernel then reads plain
weights as packed ones (0.32.0, `_setup_kernel` of its unquantized_fused_moe_method.py packs the
first time alone). Imported by the engine alone; imports nothing of it.
"""

import traceback
from pathlib import Path
from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker class, which has the model and `reload_weights`."""

    model_runner: Any
    reload_weights: Any

    def load_policy(self, weights_path: str) -> dict[str, Any]:
        """Load a Hugging Face folder in place.

        Returns:
            `repacked`: how many packed copies were renewed; or `error`: what went wrong. An
            exception would end the engine, and the reason would be lost in its log.
        """
        if not any(Path(weights_path).glob("*.safetensors")):
            return {"error": f"no *.safetensors in {weights_path} as this server sees it"}
        try:
            self.reload_weights(weights_path=weights_path)
            return {"repacked": repack(self.model_runner.get_model())}
        except Exception as error:  # noqa: BLE001 - the caller is on the other side of HTTP
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}


def repack(model: Any) -> int:
    """Renew the packed copies of layers that keep their weight beside them, and pack experts, whose
    weights the reload has left plain; returns how many.

    Layers that gave their weight up for the packed copy are renewed by the reload itself.
    """
    stale = [layer for layer in model.modules() if _keeps_both(layer)]
    for layer in stale:
        layer.quant_method.process_weights_after_loading(layer)
    experts = [(layer, _packing_experts(layer)) for layer in model.modules()]
    mixtures = [(layer, found) for layer, found in experts if found is not None]
    for layer, found in mixtures:
        found.process_weights_after_loading(layer)
    return len(stale) + len(mixtures)


def _packing_experts(layer: Any) -> Any:
    """The kernel of a layer's experts on a CPU that packs their weights; None for others."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    found = getattr(kernel, "fused_experts", None)
    packs = any(kind.__name__ == "CPUUnquantizedExperts" for kind in type(found).__mro__)
    return found if packs and hasattr(layer, "w13_weight") else None


def _keeps_both(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    # vLLM 0.32 sets `cpu_linear` on a layer: it computes with the packed copy. Where vLLM gave
    # the weight itself up, an empty tensor stands in its place.
    packed = "cpu_linear" in vars(layer) and hasattr(layer, "quant_method")
    return packed and weight is not None and weight.dim() == 2 and weight.numel() > 0
