"""Sizes of the model against the allocations that cut it."""

from collections.abc import Iterator

from shakedown.cluster.allocation import AllocationPart, parse_allocation
from shakedown.config.capacity import server_part
from shakedown.core.errors import UsageError
from shakedown.core.verdict import Finding
from shakedown.training.engines import FAMILIES
from shakedown.training.lint_rules.inputs import Inputs, advice, fault
from shakedown.training.lint_rules.model_sizes import ModelSizes


def folder_is_complete(inputs: Inputs) -> Iterator[Finding]:
    """A local folder has a config that can be read, and weights."""
    if inputs.sizes and inputs.sizes.fault:
        expected = "a Hugging Face folder with config.json and weights"
        source = inputs.config.model.source
        yield fault("model", "model.source", source, expected, inputs.sizes.fault)


def server_heads(inputs: Inputs) -> Iterator[Finding]:
    """The server's t divides the attention heads; key-value heads are divided, or held in copies.

    vLLM: `ModelConfig.verify_with_parallel_config` and each model's attention; SGLang's models
    have the same asserts.
    """
    serve, sizes = inputs.config.serve, inputs.sizes
    try:
        t = server_part(serve).size("t")
    except UsageError:
        return
    # With it SGLang cuts the heads by less than t.
    apart = any(word.startswith("--enable-dp-attention") for word in serve.extra_args)
    if sizes is None or t == 1 or apart:
        return
    heads, groups = sizes.heads, sizes.kv_heads
    if heads and heads % t:
        expected = f"a divisor of the model's {heads} attention heads as t"
        yield fault("heads", "serve.allocation", serve.allocation, expected)
    elif groups and groups % t and t % groups:
        expected = f"a divisor or a multiple of the model's {groups} key-value heads as t"
        yield fault("heads", "serve.allocation", serve.allocation, expected)


def server_layers(inputs: Inputs) -> Iterator[Finding]:
    """Each of the server's pipeline ranks has a layer."""
    serve, layers = inputs.config.serve, inputs.sizes and inputs.sizes.layers
    try:
        p = server_part(serve).size("p")
    except UsageError:
        return
    if layers and p > layers:
        expected = f"at most the model's {layers} layers as p"
        yield advice("layers", "serve.allocation", serve.allocation, expected)


def trained_weights(inputs: Inputs) -> Iterator[Finding]:
    """Quantised weights have no gradient."""
    if inputs.sizes and inputs.sizes.quantised:
        expected = "weights in floating point, to be trained"
        remedy = "config.json has a quantization_config"
        yield advice("model", "model.source", inputs.config.model.source, expected, remedy)


def trainer_cuts(inputs: Inputs) -> Iterator[Finding]:
    """Each trainer's engine can cut this kind of model, evenly."""
    sizes = inputs.sizes
    if sizes is None or not sizes.kind:
        return
    for key, stage in inputs.stages:
        try:
            part = parse_allocation(stage.allocation).parts[0]
        except UsageError:
            continue
        expected = _cut_fault(part, sizes)
        if expected:
            subject, remedy = f"{key}.allocation", f"{part.backend}:d{part.world} cuts no layer"
            yield fault("heads", subject, stage.allocation, expected, remedy)


def _cut_fault(part: AllocationPart, sizes: ModelSizes) -> str:
    """The engine's own error about the weights, as at its start; empty when they fit."""
    t, p = part.size("t"), part.size("p")
    if sizes.kind not in FAMILIES:
        splits = part.backend != "fsdp" or t > 1
        known = f"a model of {', '.join(FAMILIES)}, not {sizes.kind}"
        return f"{known}, or fsdp:d{part.world}" if splits else ""
    for letter, size, count, what in (
        ("t", t, sizes.kv_heads, "key-value heads"),
        ("t", t, sizes.heads, "attention heads"),
        ("t", t, sizes.ffn, "MLP columns"),
        ("p", p, sizes.layers, "layers"),
    ):
        if count and count % size:
            return f"a divisor of the model's {count} {what} as {letter}"
    return ""


def router_loss(inputs: Inputs) -> Iterator[Finding]:
    """The finding about the router loss of the run's first model."""
    return router_loss_left_out(inputs.sizes)


def router_loss_left_out(sizes: ModelSizes | None) -> Iterator[Finding]:
    """A warning for a router's balancing loss in config.json, which no stage's loss includes."""
    if sizes and sizes.router_loss:
        measured = "output_router_logits: true"
        expected = "false in config.json: a stage's loss is that of its tokens alone"
        remedy = "the router is trained without router_aux_loss_coef; experts may be used unevenly"
        yield advice("experts", "model.source", measured, expected, remedy)


def grade_of_experts(inputs: Inputs) -> Iterator[Finding]:
    """Experts are chosen differently by two engines: the limits for dense models are too narrow."""
    grade = inputs.config.consistency.grade
    if inputs.sizes and inputs.sizes.experts and grade == "dense":
        expected = "auto or moe, for a mixture of experts"
        yield advice("grade", "consistency.grade", grade, expected)
