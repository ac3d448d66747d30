"""Faults in a config of AReaL: YAML, read by hydra and OmegaConf.

The meaning of each key is from AReaL at 4aef98d8d of 2026-05-21, in `areal/api/cli_args.py` unless
another file is named; names, choices and defaults are those of the user's version where it can be
read. Settings on a run's command line are not known here.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, Literal

from shakedown.cluster.allocation import (
    INFERENCE,
    TRAINING,
    AllocationError,
    AllocationPart,
    parse_allocation,
)
from shakedown.config.foreign.areal_rl import lint_rl
from shakedown.config.foreign.document import (
    Document,
    dangling,
    lint_names,
    told,
)
from shakedown.config.foreign.source import Layout
from shakedown.core.errors import did_you_mean
from shakedown.core.verdict import Finding

NAME = "AReaL"
ROLES = ("rollout", "actor", "critic", "ref", "teacher")
# Sections that nothing but a config of AReaL has at its top; one of them is enough.
_SIGNS = {"actor", "rollout", "gconfig", "train_dataset", "allocation_mode"}

# Keys of earlier versions, and a mistyped one of AReaL's own examples -> the current key.
_SAMPLING = "removed: write rejection_sampling: {metric: ratio, upper: X}"
RENAMED = {
    "behave_imp_weight_cap": _SAMPLING,
    "behave_imp_weight_mode": _SAMPLING,
    "behav_imp_weight_cap": _SAMPLING,
    "launcher": "removed: `scheduler` and each engine's `scheduling_spec` are read",
}

_KINDS = {"rw": "reward model", "dpo": "DPO"}  # by train_dataset.type
_SCHEDULERS = ("local", "ray", "slurm")
LAYOUT = Layout(
    name=NAME,
    package="areal",
    roots=(".",),
    marker="areal/api/cli_args.py",
    installed=("areal",),
    kinds={
        kind: f"areal.api.cli_args:{name}"
        for kind, name in {
            "RL": "PPOConfig",
            "SFT": "SFTConfig",
            "reward model": "RWConfig",
            "DPO": "DPOConfig",
        }.items()
    },
)


def kind_of(body: Mapping[str, Any]) -> str:
    """The kind of a file: one of the schema, another kind of AReaL's, or empty."""
    if set(body) == {"env_vars"}:
        return "environment"
    script = body.get("run")
    if "resources" in body and isinstance(script, str) and "--config" in script:
        return "SkyPilot task"
    if not _SIGNS & body.keys():
        return ""
    if {"rollout", "gconfig"} & body.keys():
        return "RL"
    rows = body.get("train_dataset")
    return _KINDS.get(str(rows.get("type")) if isinstance(rows, Mapping) else "", "SFT")


def lint_areal(d: Document) -> list[Finding]:
    """Findings of a file of any kind that `kind_of` names."""
    if d.kind not in LAYOUT.kinds:
        return []
    parts, findings = _engines(d)
    findings += [*lint_names(d, RENAMED, own=True), *dangling(d)]
    findings += [*_legacy(d), *_gpus(d, parts), *_whole_nodes(d, parts), *_shared(d, parts)]
    findings += [*_scheduler(d), *_epochs(d)]
    if (
        d.kind == "reward model"
        and d.knows("actor.backend")
        and d.get("actor.is_critic") is not True
    ):
        expected = "true, with train_dataset.type: rw"
        findings.append(told("fail", "critic", "actor.is_critic", False, expected))
    return findings + (lint_rl(d, parts) if d.kind == "RL" else [])


def runs(d: Document, role: str) -> bool:
    """Whether AReaL starts an engine: the reference model only for a KL term (rl_trainer.py)."""
    if role != "ref" or d.kind != "RL":
        return d.has(role)
    return d.has(role) and (d.number("actor.kl_ctl", 0.1) or 0) > 0


def _engines(d: Document) -> tuple[dict[str, AllocationPart], list[Finding]]:
    """The parts of the engines' `backend` that can be read."""
    parts: dict[str, AllocationPart] = {}
    findings = []
    for role in ROLES:
        key, text = f"{role}.backend", d.text(f"{role}.backend")
        if not text or "${" in text:
            continue
        fault = ""
        try:
            part, *others = parse_allocation(text).parts
            parts[role] = part
            fault = _engine_fault(role, part, len(others))
        except AllocationError as error:
            fault = str(error).splitlines()[0]
        if fault:
            findings.append(told("fail", "allocation", key, text, fault))
    return parts, findings


def _engine_fault(role: str, part: AllocationPart, others: int) -> str:
    engines = INFERENCE if role == "rollout" else TRAINING
    if others:
        return "one engine: `+` and `|` do not belong in a `backend`"
    if part.backend not in engines:
        return f"an engine of {', '.join(engines)}"
    # ParallelStrategy.__post_init__ in alloc_mode.py: experts are spread over whole stages.
    experts = part.experts or part.dims
    spread = experts.get("e", 1) * part.size("p") * part.experts.get("t", 1)
    if experts.get("e", 1) > 1 and part.world % spread:
        return f"e x p (x t of ffn) = {spread} must divide the {part.world} ranks"
    return ""


def _legacy(d: Document) -> list[Finding]:
    """`allocation_mode`, which the launchers of earlier versions read."""
    text = d.text("allocation_mode")
    if not text or "${" in text:
        return []
    named = d.knows("actor.backend")  # versions before it also read forms without an engine's name
    try:
        allocation = parse_allocation(text)
    except AllocationError as error:
        if not named:
            return []
        return [told("fail", "allocation", "allocation_mode", text, str(error).splitlines()[0])]
    findings = []
    nodes, each = d.whole("cluster.n_nodes"), d.whole("cluster.n_gpus_per_node")
    if nodes and each and allocation.gpus > nodes * each:
        # Only these launchers compare (infra/utils/launcher.py); a local one takes what there is.
        strict = d.get("scheduler.type") in ("ray", "slurm")
        status: Literal["fail", "warn"] = "fail" if strict else "warn"
        expected = f"at most {nodes * each} GPUs: the cluster has {nodes} x {each}"
        findings.append(
            told(status, "gpus", "allocation_mode", f"{text}: {allocation.gpus} GPUs", expected)
        )
    if named and d.has("actor") and not d.has("actor.backend"):
        expected = "a `backend` with its engine's name in each section: AReaL's form since 2026-03"
        roles = ["rollout" if p.backend in INFERENCE else "actor" for p in allocation.parts]
        rows = [f"{r}.backend: {p}" for r, p in zip(roles, allocation.parts, strict=True)]
        remedy = f"write {', '.join(rows)}"
        findings.append(
            told("warn", "allocation", "allocation_mode", text, expected, remedy=remedy)
        )
    return findings


def _alone(d: Document, role: str) -> bool:
    """Whether a role has GPUs of its own."""
    shares = d.get(f"{role}.scheduling_strategy.type") == "colocation"
    return runs(d, role) and not shares and d.get(f"{role}.scheduling_spec.0.gpu") != 0


def _gpus(d: Document, parts: Mapping[str, AllocationPart]) -> list[Finding]:
    """Whether the engines that have GPUs of their own fit into the cluster."""
    nodes, each = d.whole("cluster.n_nodes", 32), d.whole("cluster.n_gpus_per_node", 8)
    alone = {role: part for role, part in parts.items() if _alone(d, role)}
    needed = sum(part.world for part in alone.values())
    if not alone or not d.has("cluster") or not nodes or not each or needed <= nodes * each:
        return []
    largest = max(alone, key=lambda role: alone[role].world)
    listed = " + ".join(f"{role} {part.world}" for role, part in alone.items())
    expected = f"at most {nodes * each} GPUs: the cluster has {nodes} x {each}"
    remedy = "make an engine smaller, or let it share: scheduling_strategy.type: colocation"
    # The local scheduler does not read the cluster: it goes round the GPUs that the machine has.
    status: Literal["fail", "warn"] = "warn" if d.get("scheduler.type") == "local" else "fail"
    measured = f"{listed} = {needed} GPUs"
    return [told(status, "gpus", f"{largest}.backend", measured, expected, remedy=remedy)]


def _whole_nodes(d: Document, parts: Mapping[str, AllocationPart]) -> list[Finding]:
    """Findings about whole nodes, for Slurm's scheduler (infra/scheduler/slurm.py) and servers."""
    each = d.whole("cluster.n_gpus_per_node", 8)
    if not each:
        return []
    findings = []
    for role, part in parts.items():
        if d.get("scheduler.type") == "slurm" and _alone(d, role) and part.world % each:
            expected = f"whole nodes: a multiple of {each} GPUs, with scheduler.type: slurm"
            measured = f"{part}: {part.world} GPUs"
            findings.append(told("fail", "gpus", f"{role}.backend", measured, expected))
    server = parts.get("rollout")
    size = prod(server.size(letter) for letter in "tp") if server else 0
    if size > each and size % each:
        expected = f"t x p up to {each}, or a multiple of it: a server has whole nodes"
        findings.append(told("fail", "gpus", "rollout.backend", f"t x p = {size}", expected))
    return findings


def _shared(d: Document, parts: Mapping[str, AllocationPart]) -> list[Finding]:
    """Engines that share GPUs with another one (infra/scheduler/local.py, rl_trainer.py)."""
    findings = []
    for role in filter(lambda role: runs(d, role), ROLES):
        key = f"{role}.scheduling_strategy"
        if d.get(f"{key}.type") != "colocation":
            continue
        target = d.text(f"{key}.target")
        if not runs(d, target):
            expected = "the section of an engine that runs"
            findings.append(told("fail", "colocation", f"{key}.target", target, expected))
        elif "rollout" in (role, target):
            findings += _beside_server(d, f"{key}.type")
        elif role in parts and target in parts and parts[role].world != parts[target].world:
            expected = f"the {parts[target].world} ranks of {target}, whose GPUs it shares"
            measured = f"{parts[role]}: {parts[role].world} ranks"
            findings.append(told("fail", "colocation", f"{role}.backend", measured, expected))
    return findings


def _beside_server(d: Document, key: str) -> list[Finding]:
    wanted: dict[str, tuple[object, object]] = {
        "enable_offload": (d.get("enable_offload", False), True),
        "actor.weight_update_mode": (d.get("actor.weight_update_mode", "xccl"), "disk"),
    }
    return [
        told("fail", "colocation", name, given, f"{value}, because of {key}")
        for name, (given, value) in wanted.items()
        if given != value and d.knows(name)
    ]


def _scheduler(d: Document) -> list[Finding]:
    """The kinds of schedulers, which AReaL's trainer compares with and its config does not list."""
    given = d.text("scheduler.type")
    if not given or "${" in given or given in _SCHEDULERS:
        return []
    remedy, expected = did_you_mean(given, _SCHEDULERS).strip(" ()"), " or ".join(_SCHEDULERS)
    return [told("fail", "choice", "scheduler.type", given, expected, remedy=remedy)]


def _epochs(d: Document) -> list[Finding]:
    epochs = d.number("total_train_epochs", 1)
    if epochs is None or epochs > 0:
        return []
    return [told("fail", "steps", "total_train_epochs", epochs, "1 or more")]
