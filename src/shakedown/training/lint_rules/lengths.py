"""Lengths in tokens: of model, server, prompts and answers; and values that the demo left."""

import os
from collections.abc import Iterator
from statistics import median

from shakedown.core.verdict import Finding
from shakedown.training.assets import DEMO
from shakedown.training.lint_rules.inputs import Inputs, advice, fault

# Words of any tokenizer are longer in most languages: a prompt has more tokens than this says.
_CHARACTERS_A_TOKEN = 6
# Values of config/config.yaml for two-digit addition, and its learning rates for 0.6M parameters.
DEMO_ANSWER, DEMO_LENGTH = 8, 256
DEMO_RATES = {"sft": 2.0e-3, "grpo": 2.0e-4}
# Environment and options by which an engine takes a longer sequence than its model's config says.
_LONGER = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
_OVERRIDES = ("--hf-overrides", "--rope-scaling", "--json-model-override-args")


def server_length(inputs: Inputs) -> Iterator[Finding]:
    """The server's sequences fit into the model's positions; SGLang may only warn."""
    serve, positions = inputs.config.serve, inputs.sizes and inputs.sizes.positions
    if not serve.cut or not positions or serve.max_model_len <= positions:
        return
    overridden = any(
        word.split("=")[0].replace("_", "-") in _OVERRIDES for word in serve.extra_args
    )
    if overridden or any(os.environ.get(name) for name in _LONGER):
        return
    told = fault if serve.engine == "vllm" else advice
    expected = f"at most the model's {positions} positions"
    yield told("length", "serve.max_model_len", serve.max_model_len, expected)


def trained_length(inputs: Inputs) -> Iterator[Finding]:
    """Rows of SFT are not longer than the model's positions, whatever is asked for."""
    positions = inputs.sizes and inputs.sizes.positions
    for key, stage in inputs.stages:
        longest = stage.sft and stage.sft.max_length
        if longest and positions and longest > positions:
            expected = f"at most the model's {positions} positions"
            yield advice(
                "length", f"{key}.sft.max_length", longest, expected, "it is taken for that"
            )


def comparison_length(inputs: Inputs) -> Iterator[Finding]:
    """The samples of the comparison leave room for their prompts."""
    longest, answer = inputs.config.serve.max_model_len, inputs.config.consistency.max_tokens
    if answer >= longest:
        expected = f"less than serve.max_model_len, {longest}: the prompt needs room"
        yield fault("length", "consistency.max_tokens", answer, expected)


def comparison_temperature(inputs: Inputs) -> Iterator[Finding]:
    """The run's server tells raw log-probabilities, which other temperatures do not sample by."""
    temperature = inputs.config.consistency.temperature
    if temperature != 1:
        expected = "1.0: else engine and reference differ by design"
        yield advice("temperature", "consistency.temperature", temperature, expected)


def prompt_length(inputs: Inputs) -> Iterator[Finding]:
    """The usual prompt leaves room for an answer of `max_tokens`."""
    if not inputs.train.first:
        return
    characters = median(sum(len(m["content"]) for m in row.messages) for row in inputs.train.first)
    # The demo's tokenizer has one token a character, and one before the text.
    prompt = int(characters + 1 if inputs.demo_model else characters / _CHARACTERS_A_TOKEN)
    longest = inputs.config.serve.max_model_len
    for key, stage in inputs.stages:
        if stage.grpo and stage.grpo.max_tokens < longest < prompt + stage.grpo.max_tokens:
            expected = f"at most {max(longest - prompt, 0)}: prompts have some {prompt} tokens"
            remedy = f"raise serve.max_model_len ({longest}), or leave long rows out"
            subject, measured = f"{key}.grpo.max_tokens", stage.grpo.max_tokens
            yield advice("length", subject, measured, expected, remedy)


def values_of_the_demo(inputs: Inputs) -> Iterator[Finding]:
    """A model of one's own is not run with what suits the demo's."""
    config = inputs.config
    if inputs.demo_model:
        return
    if config.serve.max_model_len == DEMO_LENGTH:
        expected = "room for your prompts and answers"
        yield _left("serve.max_model_len", DEMO_LENGTH, expected)
    for key, stage in inputs.stages:
        if stage.grpo and not stage.grpo.agent and stage.grpo.max_tokens == DEMO_ANSWER:
            expected = "your longest answer, in tokens"
            yield _left(f"{key}.grpo.max_tokens", stage.grpo.max_tokens, expected)
        # On the demo's own data a first try may learn as the demo does.
        own_data = config.data.train != DEMO
        if own_data and stage.optimizer.lr == DEMO_RATES[stage.algorithm]:
            expected = "a learning rate for your model"
            yield _left(f"{key}.optimizer.lr", stage.optimizer.lr, expected)


def _left(subject: str, measured: object, expected: str) -> Finding:
    remedy = "this is the demo's value, left with your own model"
    return advice("demo", subject, measured, expected, remedy)
