"""Rules about the inference engine's options beyond its sizes."""

import re
from collections.abc import Iterator, Mapping, Sequence

from shakedown.config.capacity import MEMORY_OPTIONS
from shakedown.core.errors import UsageError
from shakedown.core.verdict import Finding
from shakedown.inference.engines import LaunchSpec, Machine, get_engine
from shakedown.training.lint_rules.inputs import Inputs, advice, fault

# Other names of options that shakedown sets: argument parsers of vLLM and SGLang.
_ALSO = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "--tp": "--tp-size",
    "--pp": "--pp-size",
    "--dp": "--dp-size",
    "--model": "--model-path",
    "--tensor-parallel-size": "--tp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--data-parallel-size": "--dp-size",
}
_KEYS = {
    "--dtype": "model.dtype",
    "--model": "model.source",
    "--model-path": "model.source",
    "--max-model-len": "serve.max_model_len",
    "--context-length": "serve.max_model_len",
    "--seed": "seed",
    "--random-seed": "seed",
    "--default-seed": "seed",
    **{f"--{kind}-parallel-size": "serve.allocation" for kind in ("tensor", "pipeline", "data")},
    **{f"--{kind}-size": "serve.allocation" for kind in ("tp", "pp", "dp")},
}
AGENT_ENGINE = "vllm"  # of rollout/agent_sampler.py, which needs an HTTP library
_MOST_SHARED = 0.8  # vLLM's default of 0.9 leaves a tenth: too little for a trainer's states
_GPUS = Machine(cores=8, cuda=True)  # on CPUs there are options more, which a user may want too
# Of Gemma 3 with images; the sizes 270m and 1b are text alone.
_GEMMA3_NAME = re.compile(r"gemma-3-(4|12|27)b", re.IGNORECASE)
# Begins of the names of those that can (vLLM 0.32: `supports_mm_prefix`).
_BACKENDS = {"sglang": ("triton",), "vllm": ("triton", "flex_attention", "flash_attn", "rocm")}


def own_options(inputs: Inputs) -> Iterator[Finding]:
    """`extra_args` are options, and none that shakedown sets itself."""
    serve = inputs.config.serve
    for word in _strays(serve.extra_args):
        expected = "options as the command line has them: --name=value, or --name and value apart"
        # Its begin alone, here and below: a value may be a key that must not be shown.
        yield fault("extra_args", "serve.extra_args", word.split()[0].split("=")[0], expected)
    try:
        engine = get_engine(serve.engine)
        set_by_us = _options(engine.launch(LaunchSpec("m", allocation=serve.cut), _GPUS).argv)
        # Refuses what it never takes, such as a key.
        spec = LaunchSpec("m", allocation=serve.cut, extra_args=tuple(serve.extra_args))
        engine.launch(spec, _GPUS)
    except UsageError as error:
        if "extra_args" in str(error):
            measured = list(_options(serve.extra_args))
            yield fault("extra_args", "serve.extra_args", measured, str(error))
        return
    for name in _options(serve.extra_args):
        known = name if name in set_by_us else _ALSO.get(name, "")
        # A switch that is set twice changes nothing, and the device is the machine's.
        if set_by_us.get(known) and known != "--device":
            key = _KEYS.get(known)
            expected = "options that shakedown does not set itself"
            remedy = f"set {key} instead" if key else f"leave {name} out: the run depends on it"
            yield fault("extra_args", "serve.extra_args", name, expected, remedy)


def _options(words: Sequence[str]) -> Mapping[str, str]:
    """Name of each option -> its value, empty for a switch. Engines take `_` for `-` in names."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if _is_option(word):
            head, mark, value = word.partition("=")
            name = head.replace("_", "-")
            found[name] = value if mark else ""
        elif name:
            found[name], name = word, ""
    return found


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _strays(words: Sequence[str]) -> list[str]:
    """Words that no parser takes for an option or its value: the first one without `-`, and two
    words in one."""
    first = [word for word in words[:1] if word.strip() and not _is_option(word)]
    joined = [word for word in words if _is_option(word) and " " in word.partition("=")[0]]
    return first + joined


def memory_share(inputs: Inputs) -> Iterator[Finding]:
    """An engine's share of a GPU's memory is a share, and leaves some to a trainer beside it."""
    serve = inputs.config.serve
    option = MEMORY_OPTIONS.get(serve.engine, "")
    given = _options(serve.extra_args).get(option)
    try:
        share = float(given) if given is not None else None
    except ValueError:
        share = -1.0
    if share is None:
        return
    if not 0 < share <= 1:
        yield fault("gpus", "serve.extra_args", f"{option}={given}", "a share between 0 and 1")
    elif serve.share_gpus and share > _MOST_SHARED and any(s.grpo for _, s in inputs.stages):
        expected = f"{option} of {_MOST_SHARED} or less beside serve.share_gpus"
        yield advice("gpus", "serve.extra_args", f"{option}={given}", expected)


def gemma3_attention(inputs: Inputs) -> Iterator[Finding]:
    """Gemma 3's image tokens attend in both directions, which few attention backends can do.

    SGLang: its Triton backend alone (sgl-project/sglang pull request 10707), and not by itself;
    vLLM chooses one that can, unless it is told another one. Text alone is right with any.
    """
    serve, source = inputs.config.serve, inputs.config.model.source
    kind = inputs.sizes.kind if inputs.sizes else ""
    able = _BACKENDS.get(serve.engine)
    if able is None or not (kind == "gemma3" or (not kind and _GEMMA3_NAME.search(source))):
        return
    given = _options(serve.extra_args).get("--attention-backend", "")
    if given.lower().startswith(able) or (serve.engine == "vllm" and not given):
        return
    expected = f"--attention-backend={able[0]} for Gemma 3"
    measured = list(_options(serve.extra_args))
    remedy = "image tokens would attend as text does, and log-probabilities differ"
    yield advice("attention", "serve.extra_args", measured, expected, remedy)


def agent_engine(inputs: Inputs) -> Iterator[Finding]:
    """Rollouts of an agent need chat replies with token ids."""
    serve = inputs.config.serve
    engine = serve.engine
    for key, stage in inputs.stages:
        # An engine without an allocation is refused for every GRPO stage.
        if stage.grpo and stage.grpo.agent and serve.cut and engine != AGENT_ENGINE:
            subject, expected = f"{key}.grpo.agent", f"serve.engine: {AGENT_ENGINE}"
            remedy = f"{engine} gives no token ids in chat replies"
            yield fault("agent", subject, stage.grpo.agent, expected, remedy)
