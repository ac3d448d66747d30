"""Faults in a config of prime-rl: TOML files, merged one over the other.

The meaning of each key is from prime-rl at 559b44772 of 2026-08-22, in
`packages/prime-rl-configs/src/prime_rl/configs` unless another file is named; names, choices and
defaults are those of the user's version where it can be read. prime-rl refuses much of this itself
when it starts, on a cluster after the wait for its nodes; here it is reported before.
"""

from collections.abc import Mapping
from typing import Any

from shakedown.config.foreign.document import Document, lint_names, told
from shakedown.config.foreign.prime_rl_gpus import lint_gpus, trainer_world
from shakedown.config.foreign.source import Layout
from shakedown.core.verdict import Finding

NAME = "prime-rl"
# Keys of earlier versions -> their names now; prime-rl keeps no alias for an old name.
RENAMED = {
    "rollouts_per_example": "renamed to group_size",
    "async_level": "removed: orchestrator.max_off_policy_steps bounds staleness",
    "max_async_level": "removed: orchestrator.max_off_policy_steps bounds staleness",
    "strict_async_level": "removed: orchestrator.max_off_policy_steps bounds staleness",
    "max_inflight_rollouts": "renamed to concurrency.max_inflight",
    "oversampling_factor": "removed: concurrency.max_inflight bounds what is in flight",
    "resume_step": "renamed to resume.step",
    "toml_files": "removed: give the files one after the other, `rl @ base.toml @ over.toml`",
}
# A shared key -> the keys that it fills and that must not say something else (utils/validation.py).
_SHARED = {
    "model.name": ("trainer.model.name", "orchestrator.model.name", "inference.vllm.model"),
    "max_steps": ("trainer.max_steps", "orchestrator.max_steps"),
    "seq_len": ("trainer.model.seq_len", "orchestrator.seq_len"),
    "ckpt.interval": ("trainer.ckpt.interval", "orchestrator.ckpt.interval"),
    "tokenizer.name": ("trainer.tokenizer.name", "orchestrator.tokenizer.name"),
    "tokenizer.chat_template": (
        "trainer.tokenizer.chat_template",
        "orchestrator.tokenizer.chat_template",
        "inference.vllm.chat_template",
    ),
    "log.level": ("trainer.log.level", "orchestrator.log.level", "inference.log.level"),
}
# Algorithms whose advantage is a reward minus the mean of its group.
_GROUPED = ("grpo", "max_rl")
# Where each part of a run stands in a file of a kind; a part that is absent is not judged.
_PARTS = {
    "RL": {"trainer": "trainer.", "orchestrator": "orchestrator.", "inference": "inference."},
    "trainer": {"trainer": ""},
    "SFT": {"trainer": "", "inference": "inference."},
    "evals": {},
    "orchestrator": {"orchestrator": ""},
    "inference": {"inference": ""},
    "env server": {},
}


LAYOUT = Layout(
    name=NAME,
    package="prime_rl",
    roots=("packages/prime-rl-configs/src", "src", "."),
    marker="prime_rl/configs/rl.py",
    installed=("prime-rl-configs", "prime-rl"),
    kinds={
        "RL": "prime_rl.configs.rl:RLConfig",
        "SFT": "prime_rl.configs.sft:SFTConfig",
        "evals": "prime_rl.configs.evals:EvalsConfig",
        "trainer": "prime_rl.configs.trainer:TrainerConfig",
        "orchestrator": "prime_rl.configs.orchestrator:OrchestratorConfig",
        "inference": "prime_rl.configs.inference:InferenceConfig",
        "env server": "prime_rl.configs.env_server:EnvServerConfig",
    },
)
# Keys at the top by which a file's kind is told, in this order, over all versions since 2026-03.
_SIGNS = {
    "RL": {"orchestrator", "trainer"},
    "SFT": {"data"},
    "inference": {
        *("vllm", "vllm_extra", "server", "parallel", "router", "kv_cache_offload", "enable_lora"),
        *("gpu_memory_utilization", "enable_expert_parallel", "enable_eplb", "use_deep_gemm"),
    },
    "orchestrator": {
        *("train", "batch_size", "token_batch_size", "group_size", "rollouts_per_example"),
        *("algo", "concurrency", "sampling", "env"),
    },
    "trainer": {"optim", "loss", "scheduler", "max_concurrent_runs", "enable_token_export"},
}
# Keys that several kinds have: a file of nothing else is taken for the most usual kind.
_USUAL = {
    *("model", "ckpt", "slurm", "deployment", "output_dir", "max_steps", "seq_len", "tokenizer"),
    *("log", "run", "resume", "wandb", "monitors", "renderer", "inference", "weight_broadcast"),
    *("eval", "env_vars", "clean", "dry_run", "heartbeat", "val", "max_off_policy_steps"),
}


def kind_of(body: Mapping[str, Any]) -> str:
    """The kind with a key at the top; empty when half of the top keys belong to no kind."""
    known = _USUAL.union(*_SIGNS.values())
    if not body or len(known & body.keys()) * 2 < len(body):
        return ""
    # `model` is a section of the other kinds, and a name in evals.
    if "eval" in body and isinstance(body.get("model"), str):
        return "evals"
    return next((kind for kind, signs in _SIGNS.items() if signs & body.keys()), "RL")


def lint_prime_rl(d: Document) -> list[Finding]:
    """Findings of a file of any kind that `kind_of` names."""
    parts = _PARTS[d.kind]
    findings = lint_names(d, RENAMED, own=False)
    findings += lint_gpus(d, parts)
    if d.kind == "RL":
        findings += [*_shared(d), *_weights(d), *_models(d), *_timeouts(d)]
    for name, lint in (("orchestrator", _orchestrator), ("trainer", _trainer)):
        if name in parts and (not parts[name] or d.has(name)):
            findings += lint(d, parts[name])
    return findings


def _shared(d: Document) -> list[Finding]:
    """Findings about shared keys that contradict the keys that they fill."""
    findings = []
    for shared, targets in _SHARED.items():
        for key in targets:
            if d.has(shared) and d.has(key) and d.get(shared) != d.get(key):
                expected = f"{d.get(shared)!r:.80}, as {shared} says, or one of the two left out"
                findings.append(told("fail", "shared", key, d.get(key), expected))
    return findings


def _weights(d: Document) -> list[Finding]:
    """How weights reach the inference server."""
    kind = d.get("weight_broadcast.type")
    if not d.has("trainer.model.lora"):
        return []
    findings = []
    if kind in ("nccl", "nixl"):
        expected = "filesystem: adapters of LoRA are not sent through memory"
        findings.append(told("fail", "lora", "weight_broadcast.type", kind, expected))
    for name, default in (("rank", 16), ("alpha", 32)):
        key, own = f"orchestrator.model.lora.{name}", f"trainer.model.lora.{name}"
        given, trained = d.number(key), d.number(own, default)
        if given is not None and given != trained:
            expected = f"{trained}, as {own} is, or nothing"
            findings.append(told("fail", "lora", key, given, expected))
    return findings


def _models(d: Document) -> list[Finding]:
    """The orchestrator asks the server for its own model's name."""
    shared = d.get("model.name", "Qwen/Qwen3-0.6B")
    asked = d.get("orchestrator.model.name", shared)
    # Until 0.8 the server's model was `inference.model.name`.
    served = d.get("inference.vllm.model", d.get("inference.model.name", shared))
    if not d.has("inference") or served is None or asked == served:
        return []
    key = "orchestrator.model.name" if d.has("orchestrator.model.name") else "inference.vllm.model"
    expected = "one name in orchestrator.model.name and inference.vllm.model"
    return [told("fail", "model", key, f"{asked} and {served}", expected)]


def _timeouts(d: Document) -> list[Finding]:
    """Ranks that wait for a broadcast give up after the process group's time-out."""
    sends = d.number("weight_broadcast.timeout", 1200)
    waits = d.number("trainer.dist_timeout_seconds", 3600)
    through_memory = d.get("weight_broadcast.type", "nccl") != "filesystem"
    lora = d.has("trainer.model.lora")
    alone = trainer_world(d) == 1  # one rank waits for no other
    if not through_memory or lora or alone or not d.has("inference"):
        return []
    if sends is None or waits is None or sends <= waits:
        return []
    mine = d.has("trainer.dist_timeout_seconds")
    key = "trainer.dist_timeout_seconds" if mine else "weight_broadcast.timeout"
    expected = f"dist_timeout_seconds ({waits:g}) at least weight_broadcast.timeout ({sends:g})"
    remedy = "the trainer's other ranks wait in a collective while weights are sent"
    return [told("warn", "timeouts", key, waits if mine else sends, expected, remedy=remedy)]


def _orchestrator(d: Document, at: str) -> list[Finding]:
    findings = [*_batch(d, at), *_concurrency(d, at), *_groups(d, at), *_staleness(d, at)]
    return [*findings, *_sampling(d, at), *_sources(d, at), *_teachers(d, at)]


def _batch(d: Document, at: str) -> list[Finding]:
    group, batch = d.whole(f"{at}group_size", 1), d.whole(f"{at}batch_size")
    findings = []
    if batch and d.has(f"{at}token_batch_size"):
        expected = "batch_size or token_batch_size, not both"
        findings.append(told("fail", "batch", f"{at}token_batch_size", "both", expected))
    if group and batch and batch % group:
        expected = f"a multiple of group_size, {group}"
        findings.append(told("fail", "batch", f"{at}batch_size", batch, expected))
    return findings


def _concurrency(d: Document, at: str) -> list[Finding]:
    """How many episodes may be in flight; `max_inflight` is 1024 where nothing is said."""
    where = f"{at}concurrency"
    key = f"{where}.max_inflight"
    most = None if d.nulled(key) else d.whole(key, 1024)
    group = d.whole(f"{at}group_size", 1) or 1
    findings = []
    for name in ("initial_inflight", "min_inflight"):
        given = d.whole(f"{where}.{name}")
        if given is not None and most is not None and given > most:
            expected = f"at most max_inflight, {most}"
            findings.append(told("fail", "concurrency", f"{where}.{name}", given, expected))
    for name in ("initial_inflight", "max_inflight"):
        given = d.whole(f"{where}.{name}")
        if given is not None and given < group:
            expected = f"at least a group of {group}: with less, no group is ever started"
            findings.append(told("fail", "concurrency", f"{where}.{name}", given, expected))
    return findings


def _groups(d: Document, at: str) -> list[Finding]:
    """A group of one has advantage 0, which `filter_zero_advantages` drops (train_sink.py)."""
    findings = []
    key = f"{at}group_size"
    sources = d.get(f"{at}train.source")
    seen = set()
    for index in range(len(sources)) if isinstance(sources, list) else ():
        own = f"{at}train.source.{index}"
        algorithm = d.get(f"{own}.algo.type", d.get(f"{at}algo.type", "grpo"))
        place = f"{own}.group_size" if d.has(f"{own}.group_size") else key
        if d.whole(place, 1) != 1 or algorithm not in _GROUPED or place in seen:
            continue
        seen.add(place)
        expected = (
            f"2 or more with {algorithm}: one reward minus its own mean is 0, nothing is left"
        )
        remedy = "every batch is empty, and the orchestrator ends after a few of them"
        findings.append(told("warn", "groups", place, 1, expected, remedy=remedy))
    return findings


def _staleness(d: Document, at: str) -> list[Finding]:
    """Episodes that are older than `max_off_policy_steps` versions are dropped (train_sink.py)."""
    key, steps = f"{at}max_off_policy_steps", d.whole(f"{at}max_off_policy_steps", 8)
    if steps is None or steps < 0:
        return []
    if steps == 0:
        expected = "1 or more: with 0, all that is generated while the trainer steps is dropped"
        return [told("warn", "staleness", key, 0, expected)]
    batch = d.whole(f"{at}batch_size", 128)
    # Only what a user pins: without it the number adapts to the engines.
    for name in ("min_inflight", "initial_inflight"):
        flying = d.whole(f"{at}concurrency.{name}")
        if flying and batch and flying > batch * (steps + 1):
            expected = f"at most batch_size x (max_off_policy_steps + 1), {batch * (steps + 1)}"
            remedy = "more than that is too old before its turn comes, and is dropped"
            where = f"{at}concurrency.{name}"
            return [told("warn", "staleness", where, flying, expected, remedy=remedy)]
    return []


def _sampling(d: Document, at: str) -> list[Finding]:
    """Lengths and sampling of the training rollouts, and the log-probabilities of the engine."""
    findings = []
    length = d.whole(f"{at}seq_len", d.whole("seq_len", 2048) if at else 2048)
    context = d.whole("inference.vllm.max_model_len")
    sections = [f"{at}train.sampling"]
    sources = d.get(f"{at}train.source")
    count = len(sources) if isinstance(sources, list) else 0
    sections += [f"{at}train.source.{index}.sampling" for index in range(count)]
    for section in sections:
        key = f"{section}.max_completion_tokens"
        most = d.whole(key)
        if most is not None and context is not None and most >= context:
            expected = f"less than inference.vllm.max_model_len, {context}: the prompt needs room"
            findings.append(told("fail", "lengths", key, most, expected))
        elif most is not None and length is not None and most >= length:
            expected = f"less than seq_len, {length}: what is longer, with its prompt, is cut off"
            findings.append(told("warn", "lengths", key, most, expected))
        if d.number(f"{section}.temperature", 1.0) == 0:
            expected = "above 0: all answers of a group are the same, so nothing is learnt"
            findings.append(told("fail", "sampling", f"{section}.temperature", 0, expected))
        findings += _cut(d, section)
    return findings + _logprobs(d)


def _cut(d: Document, section: str) -> list[Finding]:
    """prime-rl samples from all tokens, unless `extra_body` says otherwise."""
    expected = "off: samples are cut, log-probabilities are those of all tokens"
    off = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0,)}
    return [
        told("warn", "logprobs", f"{section}.extra_body.{name}", given, expected)
        for name, values in off.items()
        if (given := d.number(f"{section}.extra_body.{name}")) is not None and given not in values
    ]


def _logprobs(d: Document) -> list[Finding]:
    """The trainer divides by each sample's temperature; vLLM must have done so too."""
    mode = d.get("inference.vllm.logprobs_mode", "processed_logprobs")
    if mode in (None, "processed_logprobs"):
        return []
    expected = "processed_logprobs, prime-rl's default: others are not those of the sampled tokens"
    return [told("warn", "logprobs", "inference.vllm.logprobs_mode", mode, expected)]


def _sources(d: Document, at: str) -> list[Finding]:
    """Names of environments, which metrics and buffers go by."""
    findings = []
    for split in ("train", "eval"):
        rows = d.get(f"{at}{split}.source")
        seen: set[str] = set()
        for index in range(len(rows)) if isinstance(rows, list) else ():
            where = f"{at}{split}.source.{index}"
            name = d.text(f"{where}.name") or d.text(f"{where}.env.taskset.id")
            if name and name in seen:
                expected = f"a distinct name for each source of {split}"
                findings.append(told("fail", "sources", where, name, expected))
            seen.add(name)
    # Until 0.7 the sources were called `env`.
    known = d.knows(f"{at}eval.source") and not d.has(f"{at}eval.env")
    if known and d.has(f"{at}eval") and not d.get(f"{at}eval.source"):
        expected = f"a [[{at}eval.source]], or no [{at}eval]"
        findings.append(told("fail", "sources", f"{at}eval", "no source", expected))
    return findings


def _teachers(d: Document, at: str) -> list[Finding]:
    """Models that somebody else serves: opd learns from `teacher`, sft from what it samples."""
    findings = []
    sources = d.get(f"{at}train.source")
    count = len(sources) if isinstance(sources, list) else 0
    for algo in (f"{at}algo", *(f"{at}train.source.{index}.algo" for index in range(count))):
        kind = d.text(f"{algo}.type", "grpo")
        key = {"opd": f"{algo}.teacher", "sft": f"{algo}.sampling.source"}.get(kind)
        if key and not (d.has(f"{key}.name") and d.has(f"{key}.base_url")):
            expected = f"a model that is served, by name and base_url, with {kind}"
            findings.append(told("fail", "teacher", key, d.get(key), expected))
        elif not key and d.get(f"{algo}.sampling.source", "policy") not in (None, "policy"):
            expected = f"policy: {kind} needs the log-probabilities of what it trains"
            findings.append(told("fail", "teacher", f"{algo}.sampling.source", "another", expected))
    return findings


def _trainer(d: Document, at: str) -> list[Finding]:
    """The learning-rate schedule against the number of steps, and lengths."""
    findings = []
    kind, steps = d.get(f"{at}scheduler.type", "constant"), d.whole("max_steps")
    steps = d.whole(f"{at}max_steps", steps)
    if kind in ("linear", "cosine"):
        phases = d.whole(f"{at}scheduler.warmup_steps", 10) or 0
        phases += (d.whole(f"{at}scheduler.decay_steps", 10) or 0) if kind == "linear" else 1
        if steps is not None and phases > steps:
            key = f"{at}scheduler.warmup_steps"
            expected = f"warm-up and decay of at most max_steps, {steps}, together"
            findings.append(told("fail", "schedule", key, phases, expected))
    rollouts = d.whole("orchestrator.seq_len", d.whole("seq_len", 2048))
    own = d.whole("trainer.model.seq_len", d.whole("seq_len", 2048))
    if d.kind == "RL" and own is not None and rollouts is not None and own < rollouts:
        key = "trainer.model.seq_len"
        expected = f"at least orchestrator.seq_len, {rollouts}"
        findings.append(told("fail", "lengths", key, own, expected))
    micro, batch = d.whole("data.micro_batch_size", 1), d.whole("data.batch_size", 128)
    if d.kind == "SFT" and micro and batch and batch % micro:
        expected = f"a multiple of data.micro_batch_size, {micro}"
        findings.append(told("fail", "batch", "data.batch_size", batch, expected))
    return findings
