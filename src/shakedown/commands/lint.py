"""`shakedown lint CONFIG...`: say what is wrong with a config before anything is started."""

import argparse
import asyncio
from pathlib import Path

from shakedown.agents.reward_pool import RewardLimits, reward_fault
from shakedown.agents.rewards import REWARDS, is_own
from shakedown.config import Config, dump_config, layers, load_config
from shakedown.config.lint import lint
from shakedown.errors import ConfigError
from shakedown.training.engines.names import DIMENSIONS
from shakedown.training.faults import KINDS
from shakedown.verdict import Finding, Stopwatch, Verdict, finish, status_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="+", type=Path, help="YAML files, later ones lie over")
    parser.add_argument("--resolved", action="store_true", help="print the resolved config too")
    parser.add_argument("--strict", action="store_true", help="exit 1 on warnings")


def run(args: argparse.Namespace) -> int:
    clock = Stopwatch()
    config = load_config(*args.config)
    findings = findings_of(config)
    status = status_of(findings)
    if args.resolved:
        print(dump_config(config))
    where = " + ".join(map(str, layers(*args.config)))
    faults = len(_faults(findings))
    summary = f"{where}: {faults} fault(s)" if faults else f"{where} is sound"
    verdict = Verdict(
        stage="lint",
        status=status,
        summary=summary,
        findings=findings,
        started=clock.started,
        seconds=clock.seconds,
    )
    code = finish(verdict, None, strict=args.strict)
    return 2 if status == "FAIL" else code


def findings_of(config: Config) -> list[Finding]:
    """Lint against the rewards, faults and engines that exist here.

    A user's own reward is imported, in a process of its own: its code may do anything.
    """
    reward, own = config.data.reward, is_own(config.data.reward)
    rewards = [*REWARDS, reward] if own else list(REWARDS)
    findings = lint(config, rewards=rewards, faults=KINDS, engines=DIMENSIONS)
    limits = RewardLimits(config.data.reward_timeout, config.data.reward_memory_gb)
    fault = asyncio.run(reward_fault(reward, limits)) if own else ""
    return [*findings, _reward_finding(reward, fault)] if fault else findings


def _faults(findings: list[Finding]) -> list[Finding]:
    """What stops a run; the others are advice."""
    return [finding for finding in findings if finding.status != "warn"]


def _reward_finding(reward: str, fault: str) -> Finding:
    return Finding(
        check="reward",
        status="fail",
        scope="config",
        subject="data.reward",
        measured=reward,
        expected="a function (completion, answer) -> float",
        blame="user",
        remedy=fault,
    )


def require_sound(config: Config, where: str) -> Config:
    """Return the config.

    Raises:
        ConfigError: lint has something against it.
    """
    findings = _faults(findings_of(config))
    if not findings:
        return config
    rows = [f"{f.subject}: got {f.measured!r}, expected {f.expected}. {f.remedy}" for f in findings]
    listed = "\n  ".join(rows)
    raise ConfigError(f"{where}: {len(findings)} fault(s)\n  {listed}")
