"""Lint of a config against the rewards, faults and engines that exist here, and by the rules."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shakedown.agents.rewards import REWARDS, is_own
from shakedown.config import Config, KeyLocations
from shakedown.config.lint import lint
from shakedown.core.errors import ConfigError
from shakedown.core.verdict import Finding, Stopwatch, Verdict, counted, status_of
from shakedown.training.engines import DIMENSIONS
from shakedown.training.faults import KINDS
from shakedown.training.lint_rules import apply_rules, read_inputs
from shakedown.training.lint_rules.inputs import advice
from shakedown.training.lint_rules.own_code import own_code


def findings_of(config: Config) -> list[Finding]:
    """All faults of a config, and suspicious settings.

    A user's own reward is called in a separate process, and so is an agent's module imported if it
    does not show its class: their code may do anything.
    """
    reward, own = config.data.reward, is_own(config.data.reward)
    # `lint` compares names: a user's own reward passes there, and is judged by its calls below.
    rewards = [*REWARDS, reward] if own else list(REWARDS)
    findings = lint(config, rewards=rewards, faults=KINDS, engines=DIMENSIONS)
    # Data of an unknown format cannot be read, and nothing be said of them.
    if any(finding.subject == "data.format" for finding in findings):
        return findings
    inputs = read_inputs(config)
    return [*findings, *apply_rules(inputs), *asyncio.run(own_code(inputs))]


def faults_of(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that stop a run; the others are advice."""
    return [finding for finding in findings if finding.status != "warn"]


def judge_config(config: Config, paths: Sequence[Path]) -> Verdict:
    """The findings as a verdict; `paths`: the files of the config, in which each has its place."""
    clock = Stopwatch()
    where = " + ".join(map(str, paths))
    findings = [*_placed(findings_of(config), paths), *_left_out(config, KeyLocations(paths))]
    return Verdict(
        stage="lint",
        status=status_of(findings),
        summary=f"{where}: {counted(findings)}" if findings else f"{where} is sound",
        findings=findings,
        started=clock.started,
        seconds=clock.seconds,
    )


def _left_out(config: Config, written: KeyLocations) -> list[Finding]:
    """Stages that `order` does not name, written beside it or over it: perhaps forgotten there.

    An overlay leaves stages of the files below it out by an `order` of its own.
    """
    names = [name for name in written.below("stages") if name not in config.stages]
    keys = [f"stages.{name}" for name in names if not written.is_over("order", f"stages.{name}")]
    told = [advice("order", key, "not in `order`", "each stage that is to run") for key in keys]
    return [replace(each, evidence=[written.at(each.subject)]) for each in told]


def _placed(findings: Sequence[Finding], paths: Sequence[Path]) -> list[Finding]:
    """Each with `FILE:LINE:COLUMN` of its key as evidence."""
    written = KeyLocations(paths)
    places = ((finding, written.at(finding.subject)) for finding in findings)
    return [replace(found, evidence=[place]) if place else found for found, place in places]


def require_sound(config: Config, paths: Sequence[Path]) -> list[str]:
    """The advice of lint, one sentence each; `paths`: the config's files, to locate keys in.

    Raises:
        ConfigError: lint found faults in the config.
    """
    findings = _placed(findings_of(config), paths)
    faults = faults_of(findings)
    if not faults:
        return [_row(finding) for finding in findings]
    listed = "\n  ".join(map(_row, faults))
    where = " + ".join(map(str, paths)) or "config"
    raise ConfigError(f"{where}: {len(faults)} fault(s)\n  {listed}")


def _row(finding: Finding) -> str:
    place = "".join(f"{each}: " for each in finding.evidence)
    told = f"got {finding.measured!r}, expected {finding.expected}. {finding.remedy}"
    return f"{place}{finding.subject}: {told}"
