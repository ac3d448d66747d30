"""`shakedown agent run` and `shakedown agent checks`: does an agent class stand real load?"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shakedown.commands.arguments import above_zero, number, positive
from shakedown.core.errors import UsageError
from shakedown.core.files import write_text
from shakedown.core.verdict import Stopwatch, Verdict, finish, installed_versions, status_of
from shakedown.data_sources import read_rows

if TYPE_CHECKING:
    from shakedown.agent_checks.checks import CheckResult
    from shakedown.agents.runner import AgentEndpoint, Episode

_NO_KEY = "None"  # a local server wants some key; the guides give this one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `run` and `checks`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="run|checks")
    form = argparse.ArgumentDefaultsHelpFormatter
    run_parser = actions.add_parser("run", help="run a class over data rows", formatter_class=form)
    run_parser.add_argument("target", help="package.module:Class or path/to/file.py:Class")
    run_parser.add_argument("--data", required=True, help="JSON lines, or hub:NAME[:SPLIT]")
    run_parser.add_argument("--base-url", help="the server's URL (else OPENAI_BASE_URL)")
    run_parser.add_argument("--concurrency", type=positive, default=64, help="episodes at once")
    run_parser.add_argument("--group-size", type=positive, default=1, help="samples a row")
    run_parser.add_argument("--limit", type=positive, help="use the first K rows only")
    run_parser.add_argument("--model", default="", help="model name (else what the server serves)")
    run_parser.add_argument("--min-success-rate", type=number(0, 1), default=1.0, help="0..1")
    run_parser.set_defaults(act=_run)
    checks = actions.add_parser("checks", help="run the checks in order", formatter_class=form)
    checks.add_argument("--config", nargs="+", type=Path, required=True, help="YAML files")
    checks.add_argument("--endpoint", type=Path, required=True, help="endpoint.json of `serve`")
    checks.add_argument("--data", help="rows to use (else the config's held-out rows)")
    checks.set_defaults(act=_checks)
    for each, timeout in ((run_parser, 120.0), (checks, None)):
        each.add_argument("--out", type=Path, default=Path("results/agent"), help="results folder")
        each.add_argument(
            "--episode-timeout",
            type=above_zero,
            default=timeout,
            help="seconds an episode may take",
        )
        each.add_argument(
            "--separate-tls",
            action="store_true",
            help="let each client build its own TLS context, as it will in training",
        )
        each.add_argument("--strict", action="store_true", help="a WARN exits with 1")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action and return its exit code."""
    code: int = args.act(args)
    return code


def _run(args: argparse.Namespace) -> int:
    from shakedown.agent_checks.judge import judge_run, metrics, summary, to_extra
    from shakedown.agent_checks.server_probe import ask_server
    from shakedown.agents.contract import load_agent
    from shakedown.agents.runner import RunSettings, drive, run_episodes

    watch = Stopwatch()
    agent = load_agent(args.target)
    rows = read_rows(args.data, limit=args.limit)
    endpoint = _endpoint(args.base_url, args.model)
    settings = RunSettings(
        args.concurrency, args.group_size, args.episode_timeout, not args.separate_tls
    )
    total = len(rows) * args.group_size
    print(f"{total} episodes of {args.target}, {args.concurrency} at once", file=sys.stderr)
    result = drive(run_episodes(agent, rows, endpoint, settings))
    failed = any(not episode.ok for episode in result.episodes)
    server = drive(ask_server(endpoint.base_url if failed else "", endpoint.api_key))
    findings = judge_run(result, server, min_success_rate=args.min_success_rate)
    _write_episodes(args.out, result.episodes)
    verdict = Verdict(
        stage="agents",
        status=status_of(findings),
        summary=summary(result, server),
        findings=findings,
        metrics=metrics(result),
        started=watch.started,
        seconds=watch.seconds,
        versions=_versions(),
        next=""
        if not failed
        else f"shakedown agent run {args.target} --data {args.data} --limit 1",
        extra={"target": args.target, "base_url": endpoint.base_url, **to_extra(result)},
    )
    return finish(verdict, args.out / "verdict.json", strict=args.strict)


def _checks(args: argparse.Namespace) -> int:
    from shakedown.agent_checks.checks import CheckPlan, CheckSettings, check_metrics, run_checks
    from shakedown.agent_checks.training_path import training_settings
    from shakedown.agents.contract import load_agent
    from shakedown.agents.runner import drive
    from shakedown.commands.assets_file import heldout_source
    from shakedown.config import load_config
    from shakedown.inference.folder import ServerFolder
    from shakedown.inference.lease import Lease
    from shakedown.inference.server import ensure

    watch = Stopwatch()
    config = load_config(*args.config)
    served = ensure(args.endpoint)
    settings = CheckSettings(
        prompts=config.agents.prompts,
        group_size=config.agents.group_size,
        episode_timeout=args.episode_timeout or config.agents.episode_timeout,
        min_success_rate=config.agents.min_success_rate,
        share_tls=not args.separate_tls,
    )
    agent = load_agent(config.agents.target)
    rows = read_rows(args.data or heldout_source(config), limit=settings.prompts)
    endpoint = _endpoint(served.base_url, served.served_name)
    plan = CheckPlan(agent, rows, endpoint, settings, training_settings(config, served.engine))
    with Lease(ServerFolder(args.endpoint.parent).lease):
        checks = drive(run_checks(plan, progress=lambda line: print(f"  {line}", flush=True)))
    _write_episodes(args.out, [e for r in checks if r.result for e in r.result.episodes], checks)
    findings = [finding for check in checks for finding in check.findings]
    verdict = Verdict(
        stage="agents",
        status=status_of(findings),
        summary=_summary(checks),
        findings=findings,
        metrics=check_metrics(checks),
        started=watch.started,
        seconds=watch.seconds,
        versions=_versions(),
        extra={"target": config.agents.target, "base_url": plan.endpoint.base_url},
    )
    return finish(verdict, args.out / "verdict.json", strict=args.strict)


def _summary(checks: "list[CheckResult]") -> str:
    for check in checks:
        if not check.passed:
            return f"check `{check.name}` failed: {check.sentence}"
    total = sum(len(check.result.episodes) for check in checks if check.result)
    names = ", ".join(check.name for check in checks)
    return f"all checks passed ({names}): {total} episodes"


def _endpoint(base_url: str | None, model: str) -> "AgentEndpoint":
    """Normalise the URL and ask for the served model's name; a dead server is judged later."""
    from shakedown.agent_checks.server_probe import ask_server, with_version
    from shakedown.agents.runner import AgentEndpoint, drive

    url = base_url or os.environ.get("OPENAI_BASE_URL", "")
    if url and not url.startswith(("http://", "https://")):
        raise UsageError(f"--base-url {url!r}: expected http://HOST:PORT or https://...")
    url = with_version(url)
    key = os.environ.get("OPENAI_API_KEY") or (_NO_KEY if url else "")
    if url and not model:
        model = next(iter(drive(ask_server(url, key)).models), "")
    return AgentEndpoint(url, key, model)


def _write_episodes(
    out: Path, episodes: "Iterable[Episode]", checks: "Iterable[CheckResult]" = ()
) -> None:
    """One line an episode; lines of checks name their check."""
    check_of = {
        id(e): check.name for check in checks if check.result for e in check.result.episodes
    }
    lines: list[dict[str, Any]] = [
        {**({"check": check_of[id(e)]} if id(e) in check_of else {}), **e.to_json()}
        for e in episodes
    ]
    write_text(out / "episodes.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def _versions() -> dict[str, str]:
    return installed_versions("openai", "httpx", "httpx2")
