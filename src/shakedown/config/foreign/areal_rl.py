"""Faults in an RL config of AReaL: staleness, lengths, log-probabilities, time-outs.

Everything here is from AReaL's source; the file is named where it is not `areal/api/cli_args.py`.
"""

import re
from collections.abc import Mapping
from typing import Literal

from shakedown.cluster.allocation import AllocationPart
from shakedown.config.foreign.document import Document, told
from shakedown.core.verdict import Finding

_CONTEXT = {"sglang": "sglang.context_length", "vllm": "vllm.max_model_len"}
_BEHIND = "rollout.max_head_offpolicyness"
_QUEUE = 16  # the queue holds so many times `max_concurrent_rollouts` (infra/workflow_executor.py)


def lint_rl(d: Document, parts: Mapping[str, AllocationPart]) -> list[Finding]:
    """Findings of a config with rollouts; `parts`: the engines whose `backend` could be read."""
    engine = re.match("[a-z]+", d.text("allocation_mode"))
    backend = parts["rollout"].backend if "rollout" in parts else engine[0] if engine else ""
    findings = [*_staleness(d), *_queue(d), *_timeouts(d), *_online(d)]
    findings += [*_lengths(d, backend), *_packed(d), *_overlong(d)]
    if d.has("actor"):
        findings += [*_temperature(d, backend), *_ratio(d), *_reference(d), *_groups(d)]
        findings += [*_same_model(d, backend), *_unsupported(d, parts)]
    return [*findings, *_sampling(d)]


def _staleness(d: Document) -> list[Finding]:
    """Whether the rule that bounds staleness lets all batches through.

    infra/staleness_manager.py starts a rollout while accepted + running is below
    (max_head_offpolicyness + version + 1) * consumer_batch_size. The trainer takes
    train_dataset.batch_size rollouts a version, so with B of them and a smaller consumer_batch_size
    C batch n begins only while n * B <= (offpolicyness + n) * C.
    """
    batch = d.whole("train_dataset.batch_size", 1) if d.has("train_dataset") else None
    own, behind = d.whole("rollout.consumer_batch_size", 1), d.whole(_BEHIND, 0)
    if not d.has("rollout") or batch is None or own is None or behind is None:
        return []
    own = max(1, own)
    if behind < 0:
        expected = "0 or more: with less, no rollout is ever started"
        return [told("fail", "staleness", _BEHIND, behind, expected)]
    key = "rollout.consumer_batch_size"
    if own > batch:
        expected = f"train_dataset.batch_size, {batch}: with more, rollouts pile up and grow stale"
        return [told("warn", "staleness", key, own, expected)]
    batches = behind * own // (batch - own) if own < batch else None
    steps = d.whole("total_train_steps")
    if batches is None or (steps is not None and steps <= batches):
        return []
    expected = (
        f"train_dataset.batch_size, {batch}: the rollout blocks forever "
        f"{f'after {batches} batches' if batches else 'before the first batch is full'}"
    )
    # Rejected rollouts do not count as accepted, and with dynamic_bs they fill a batch.
    status: Literal["fail", "warn"] = "warn" if d.get("dynamic_bs") is True else "fail"
    remedy = "write consumer_batch_size: ${train_dataset.batch_size}"
    return [told(status, "staleness", key, own, expected, remedy=remedy)]


def _queue(d: Document) -> list[Finding]:
    """`active_submit_and_wait` raises when a batch does not fit into the queue."""
    batch = d.whole("train_dataset.batch_size", 1)
    own = d.whole("rollout.consumer_batch_size", 1) or 1
    at_once = d.whole("rollout.max_concurrent_rollouts") or own
    key = "rollout.queue_size" if d.has("rollout.queue_size") else "rollout.max_concurrent_rollouts"
    size = d.whole("rollout.queue_size") or at_once * _QUEUE
    if not d.has("rollout") or batch is None or size >= batch:
        return []
    expected = f"room for a batch of {batch}"
    return [told("fail", "queue", key, f"a queue of {size}", expected)]


def _timeouts(d: Document) -> list[Finding]:
    findings = []
    for name in ("request_timeout", "setup_timeout", "agent.session_timeout_seconds"):
        seconds = d.number(f"rollout.{name}")
        if seconds is not None and seconds <= 0:
            expected = "a time above 0 seconds"
            findings.append(told("fail", "timeouts", f"rollout.{name}", seconds, expected))
    session = d.number("rollout.agent.session_timeout_seconds", 3600)
    request = d.number("rollout.request_timeout", 3600)
    final = d.number("rollout.agent.set_reward_finish_timeout", 0)
    if not d.has("rollout.agent") or session is None:
        return findings
    # experimental/openai/proxy/proxy_rollout_server.py drops a session without calls for so long.
    if request is not None and 0 < session < request:
        key = "rollout.agent.session_timeout_seconds"
        expected = f"at least rollout.request_timeout, {request:g}: a session ends under its call"
        findings.append(told("warn", "timeouts", key, session, expected))
    if final is not None and final >= session > 0:
        key = "rollout.agent.set_reward_finish_timeout"
        expected = f"below the session's {session:g} s: it is gone before its reward is final"
        findings.append(told("warn", "timeouts", key, final, expected))
    return findings


def _online(d: Document) -> list[Finding]:
    """trainer/rl_trainer.py: a run whose rollouts are sessions of its users."""
    if d.get("rollout.agent.mode") != "online":
        return []
    findings = []
    if d.has("valid_dataset"):
        expected = "none, with rollout.agent.mode: online"
        findings.append(told("fail", "online", "valid_dataset", "a data set", expected))
    steps, epochs = d.whole("total_train_steps"), d.whole("total_train_epochs", 1)
    if not d.has("total_train_steps") or (steps and epochs and steps < epochs):
        expected = "at least one step an epoch, with rollout.agent.mode: online"
        findings.append(told("fail", "online", "total_train_steps", steps, expected))
    return findings


def _lengths(d: Document, backend: str) -> list[Finding]:
    """Whether prompt and answer fit into the engine's context, and each other."""
    findings = []
    new, least = d.whole("gconfig.max_new_tokens", 16384), d.whole("gconfig.min_new_tokens", 0)
    total = d.whole("gconfig.max_tokens", 32768)
    if new is None or total is None:
        return []
    given = d.has("gconfig.max_new_tokens")
    if given and least is not None and least > new:
        expected = f"at most gconfig.max_new_tokens, {new}"
        findings.append(told("fail", "lengths", "gconfig.min_new_tokens", least, expected))
    if given and new > total:
        expected = f"at most gconfig.max_tokens, {total}, which counts the prompt too"
        findings.append(told("warn", "lengths", "gconfig.max_new_tokens", new, expected))
    key = _CONTEXT.get(backend, "")
    context = d.whole(key, 32768) if key and d.has(key) else None
    if context is None:
        return findings
    prompt = d.whole("train_dataset.max_length")
    if given and new >= context:
        expected = f"less than {key}, {context}: the prompt needs room"
        findings.append(told("fail", "lengths", "gconfig.max_new_tokens", new, expected))
    elif given and prompt and min(prompt + new, total) > context:
        measured = f"prompt {prompt} + answer {new} tokens"
        expected = f"at most {key}, {context}: the engine refuses more, and AReaL drops the rollout"
        findings.append(told("warn", "lengths", "gconfig.max_new_tokens", measured, expected))
    for name in ("gconfig.max_tokens", "rollout.agent.engine_max_tokens"):
        limit = d.whole(name)
        if limit is not None and limit > context:
            expected = f"at most {key}, {context}"
            findings.append(told("warn", "lengths", name, limit, expected))
    return findings


def _packed(d: Document) -> list[Finding]:
    """utils/seqpack.py raises for a sequence that is longer than a micro-batch."""
    new, total = d.whole("gconfig.max_new_tokens"), d.whole("gconfig.max_tokens", 32768)
    if new is None or total is None:
        return []
    longest = min(new + (d.whole("train_dataset.max_length") or 0), total)
    findings = []
    for role in ("actor", "critic"):
        key = f"{role}.mb_spec.max_tokens_per_mb"
        room = d.whole(key)
        if room is None or room >= longest:
            continue
        sure = room < min(new, total)
        expected = (
            f"at least the longest sequence, {longest} tokens: one that is longer ends the run"
        )
        findings.append(told("fail" if sure else "warn", "lengths", key, room, expected))
    return findings


def _overlong(d: Document) -> list[Finding]:
    """The penalty for long answers takes its limit from another key than the engine."""
    if d.get("actor.overlong_reward_penalty") is not True:
        return []
    findings = []
    own, new = d.whole("actor.max_new_tokens", 1024), d.whole("gconfig.max_new_tokens", 16384)
    if own != new:
        expected = f"gconfig.max_new_tokens, {new}: the penalty begins by it"
        findings.append(told("warn", "lengths", "actor.max_new_tokens", own, expected))
    for name in ("overlong_tokens", "overlong_penalty_factor"):
        if not d.has(f"actor.{name}"):
            expected = "a number, with overlong_reward_penalty: true"
            findings.append(told("fail", "lengths", f"actor.{name}", None, expected))
    tokens = d.whole("actor.overlong_tokens")
    if tokens is not None and own is not None and tokens >= own:
        expected = f"below actor.max_new_tokens, {own}"
        findings.append(told("fail", "lengths", "actor.overlong_tokens", tokens, expected))
    return findings


def _engine_counts(d: Document) -> bool:
    """Whether the engine's log-probabilities enter the loss (trainer/ppo/actor.py)."""
    recomputed = d.get("actor.recompute_logprob") is True
    return d.get("actor.use_decoupled_loss") is True or not recomputed


def _temperature(d: Document, backend: str) -> list[Finding]:
    """The trainer divides its logits by `actor.temperature`, the engine by gconfig's."""
    sampled, scored = d.number("gconfig.temperature", 1.0), d.number("actor.temperature", 1.0)
    if sampled is None or scored is None or d.get("gconfig.greedy") is True:
        return []
    findings = []
    if sampled != scored:
        expected = f"gconfig.temperature, {sampled:g}: else every importance ratio is wrong"
        remedy = "write temperature: ${gconfig.temperature}"
        findings.append(
            told("fail", "logprobs", "actor.temperature", scored, expected, remedy=remedy)
        )
    # vLLM's default is `raw_logprobs`, before temperature; AReaL has no key for the other mode.
    if backend == "vllm" and sampled not in (0, 1) and _engine_counts(d):
        expected = "1 with vLLM, whose log-probabilities are those before temperature"
        remedy = "use SGLang, or recompute_logprob: true without use_decoupled_loss"
        findings.append(
            told("warn", "logprobs", "gconfig.temperature", sampled, expected, remedy=remedy)
        )
    return findings


def _ratio(d: Document) -> list[Finding]:
    """Which importance ratio the loss uses, and whether what bounds it is used."""
    decoupled = d.get("actor.use_decoupled_loss") is True
    behind = d.whole(_BEHIND, 0) or 0
    findings = []
    if not decoupled and d.has("actor.rejection_sampling"):
        expected = "use_decoupled_loss: true, without which nothing is rejected"
        findings.append(
            told("warn", "logprobs", "actor.rejection_sampling", "without effect", expected)
        )
    if decoupled and d.get("actor.use_sapo_loss") is True:
        expected = "false with use_sapo_loss: true"
        findings.append(told("fail", "logprobs", "actor.use_decoupled_loss", True, expected))
    if not decoupled and d.get("actor.recompute_logprob") is True and behind > 0:
        expected = (
            "use_decoupled_loss: true with max_head_offpolicyness above 0: recomputed "
            "log-probabilities make stale samples look as if they were on-policy"
        )
        findings.append(told("warn", "logprobs", "actor.recompute_logprob", True, expected))
    upper, lower = (d.number(f"actor.rejection_sampling.{name}") for name in ("upper", "lower"))
    metric = d.get("actor.rejection_sampling.metric", "ratio")
    if upper is not None and metric == "ratio" and upper <= 1:
        expected = "above 1: a ratio of 1 is not a divergence"
        findings.append(told("fail", "logprobs", "actor.rejection_sampling.upper", upper, expected))
    if upper is not None and lower is not None and lower > upper:
        expected = f"at most upper, {upper:g}"
        findings.append(told("fail", "logprobs", "actor.rejection_sampling.lower", lower, expected))
    return findings


def _reference(d: Document) -> list[Finding]:
    """trainer/ppo/actor.py takes 0 for the reference's log-probabilities when there are none."""
    weight = d.number("actor.kl_ctl", 0.1)
    if d.has("ref") or weight is None or weight <= 0:
        return []
    expected = "a section `ref`, or 0: without one the KL term rewards unlikely tokens"
    return [told("fail", "logprobs", "actor.kl_ctl", weight, expected)]


def _sampling(d: Document) -> list[Finding]:
    """Whether samples of one prompt differ, and come from the distribution that is scored."""
    samples = d.whole("gconfig.n_samples", 1)
    greedy, temperature = d.get("gconfig.greedy") is True, d.number("gconfig.temperature", 1.0)
    if d.has("actor") and (greedy or temperature == 0):
        key = "gconfig.greedy" if greedy else "gconfig.temperature"
        expected = f"sampling: all {samples} answers of a prompt are the same, so nothing is learnt"
        return [told("fail", "sampling", key, d.get(key), expected)]
    findings = []
    top_p, top_k = d.number("gconfig.top_p", 1.0), d.number("gconfig.top_k")
    for key, value, cut in (
        ("gconfig.top_p", top_p, top_p is not None and top_p < 1),
        # The default is 1e8; -1 means all to both engines.
        ("gconfig.top_k", top_k, top_k is not None and 0 < top_k < 100_000),
    ):
        if d.has("actor") and cut:
            expected = "off: samples are cut, log-probabilities are those of all tokens"
            findings.append(told("warn", "logprobs", key, value, expected))
    return findings


def _groups(d: Document) -> list[Finding]:
    """A norm over groups cuts the batch by its own `group_size` (utils/data.py)."""
    samples = d.whole("gconfig.n_samples", 1)
    findings = []
    for norm in ("actor.reward_norm", "actor.adv_norm"):
        grouped = "group" in (d.get(f"{norm}.mean_level"), d.get(f"{norm}.std_level"))
        size, key = d.whole(f"{norm}.group_size", 1), f"{norm}.group_size"
        if not grouped or size is None or samples is None:
            continue
        if size != samples:
            expected = f"gconfig.n_samples, {samples}: else groups are of several prompts"
            findings.append(told("fail", "groups", key, size, expected))
        centred = d.get(f"{norm}.mean_level") == "group"
        if size == samples == 1 and centred and d.get(f"{norm}.mean_leave1out") is not True:
            expected = "2 or more: a group of one minus its mean is 0, so nothing is learnt"
            findings.append(told("warn", "groups", key, size, expected))
    return findings


def _same_model(d: Document, backend: str) -> list[Finding]:
    """Whether engine and trainer have one model, in one precision."""
    names = {"sglang": ("sglang.model_path", "sglang.dtype"), "vllm": ("vllm.model", "vllm.dtype")}
    findings = []
    for key, own in zip(names.get(backend, ()), ("actor.path", "actor.dtype"), strict=False):
        served, trained = d.text(key), d.text(own)
        if served and trained and served != trained:
            expected = f"{own}, {trained}: the first rollouts are scored by another model"
            findings.append(told("warn", "logprobs", key, served, expected))
    lora = d.get("actor.use_lora") is True and d.knows("rollout.use_lora")
    if lora and d.get("rollout.use_lora", False) is not True:
        expected = "true, as actor.use_lora is"
        findings.append(told("warn", "lora", "rollout.use_lora", False, expected))
    return findings


def _unsupported(d: Document, parts: Mapping[str, AllocationPart]) -> list[Finding]:
    """Combinations that `_validate_cfg` of trainer/rl_trainer.py refuses."""
    engines = {role: part.backend for role, part in parts.items()}
    findings = []
    if engines.get("rollout") == "vllm" and d.get("rollout.return_routed_experts") is True:
        expected = "false with vLLM: only SGLang returns them"
        findings.append(told("fail", "engine", "rollout.return_routed_experts", True, expected))
    lora = d.get("actor.use_lora") is True
    if lora and (engines.get("actor"), engines.get("rollout")) == ("megatron", "sglang"):
        expected = "vLLM for the rollout, or no LoRA, with a Megatron actor"
        findings.append(told("fail", "engine", "actor.use_lora", True, expected))
    for role in ("actor", "critic", "ref", "teacher"):
        if d.get(f"{role}.offload") is True and d.get("enable_offload", False) is not True:
            expected = "enable_offload: true at the top"
            findings.append(told("fail", "engine", f"{role}.offload", True, expected))
    return findings
