"""`shakedown agent run` and `shakedown agent checks`: does an agent class stand real load?"""

import argparse
import asyncio
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shakedown.commands.arguments import (
    Actions,
    above_zero,
    add_config,
    add_strict,
    key_values,
    number,
    place,
    positive,
    run_action,
    run_config,
)
from shakedown.core.paths import AgentsPaths
from shakedown.core.verdict import Stopwatch, finish, with_findings

if TYPE_CHECKING:
    from shakedown.agent_checks.episodes import RunResult
    from shakedown.inference.relay import Servers

EXAMPLES = (
    "shakedown agent run my_agent.py:Agent --data prompts.jsonl"
    " --base-url http://127.0.0.1:8000/v1 --limit 1",
    "shakedown agent checks --config config/config.yaml"
    " --endpoint results/demo/serve/policy/endpoint.json",
)
run = run_action


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `run` and `checks`."""
    actions = Actions(parser)
    run_parser = actions.add(
        "run",
        _run,
        "Run an agent class over data rows and judge its episodes.",
        EXAMPLES[0],
        "shakedown agent run my_package.agents:Agent --data hub:openai/gsm8k --concurrency 256"
        " --group-size 8",
    )
    run_parser.add_argument(
        "target", type=place, help="package.module:Class or path/to/file.py:Class"
    )
    run_parser.add_argument(
        "--data", type=place, required=True, help="JSON lines, or hub:NAME[:SPLIT]"
    )
    run_parser.add_argument(
        "--kwargs",
        type=key_values,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of the class's constructor, or a JSON object of them; may be repeated",
    )
    run_parser.add_argument(
        "--base-url", help="the server's URL, or URL,URL (default: OPENAI_BASE_URL)"
    )
    run_parser.add_argument("--concurrency", type=positive, default=64, help="episodes at once")
    run_parser.add_argument("--group-size", type=positive, default=1, help="samples a row")
    run_parser.add_argument("--limit", type=positive, help="use the first K rows only")
    run_parser.add_argument(
        "--model", default="", help="model name (default: what the server serves)"
    )
    run_parser.add_argument(
        "--min-success-rate", type=number(0, 1), default=1.0, help="share of good episodes, 0..1"
    )
    _common_arguments(run_parser)
    run_parser.add_argument(
        "--episode-timeout", type=above_zero, default=120.0, help="seconds an episode may take"
    )
    _checks_arguments(actions)


def _checks_arguments(actions: Actions) -> None:
    checks = actions.add(
        "checks",
        _checks,
        "Check a run's agent class: one episode, all at once, groups, the rollout controller.",
        EXAMPLES[1],
        EXAMPLES[1] + " --data prompts.jsonl --strict",
    )
    add_config(checks)
    checks.add_argument(
        "--endpoint",
        type=Path,
        required=True,
        metavar="FILE",
        help="endpoint.json of `shakedown serve`",
    )
    checks.add_argument(
        "--data", type=place, help="rows to use (default: the config's held-out rows)"
    )
    _common_arguments(checks)
    checks.add_argument(
        "--episode-timeout",
        type=above_zero,
        help="seconds an episode may take (default: the config's)",
    )


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("results/agent"), help="results folder")
    parser.add_argument(
        "--separate-tls",
        action="store_true",
        help="let each client build its own TLS context, as it does without shakedown",
    )
    add_strict(parser)


def _run(args: argparse.Namespace) -> int:
    from shakedown.agents.episode_tag import HEADER
    from shakedown.inference.relay import relayed

    given = args.base_url or os.environ.get("OPENAI_BASE_URL", "")
    key = os.environ.get("OPENAI_API_KEY", "")
    with relayed(given, key, sticky=HEADER) as servers:
        return _run_on(servers, args)


def _run_on(servers: "Servers", args: argparse.Namespace) -> int:
    from shakedown.agent_checks.episode_source import episode_source
    from shakedown.agent_checks.results import run_verdict, write_episodes
    from shakedown.agent_checks.runner import RunSettings, run_episodes
    from shakedown.agent_checks.server_probe import ask_server, find_endpoint
    from shakedown.rollout.agent_sampler import agent_rows

    watch = Stopwatch()
    kwargs = {key: value for given in args.kwargs for key, value in given.items()}
    rows = agent_rows(args.data, limit=args.limit)
    endpoint = find_endpoint(servers.url, args.model)
    opened = episode_source(
        args.target,
        endpoint,
        seconds=args.episode_timeout,
        share_tls=not args.separate_tls,
        kwargs=kwargs,
    )

    async def run_rows() -> "RunResult":
        async with opened as source:
            settings = RunSettings(args.concurrency, args.group_size)
            return await run_episodes(source, rows, settings)

    total = len(rows) * args.group_size
    print(f"{total} episodes of {args.target}, {args.concurrency} at once", file=sys.stderr)
    result = asyncio.run(run_rows())
    failed = any(not episode.ok for episode in result.episodes)
    # Asked only after failures, which its state may explain; with an empty URL nothing is asked.
    server = asyncio.run(ask_server(endpoint.base_url if failed else "", endpoint.api_key))
    paths = AgentsPaths(args.out)
    write_episodes(paths.episodes, result.episodes)
    verdict = run_verdict(result, server, watch, min_success_rate=args.min_success_rate)
    given = f" --kwargs {shlex.quote(json.dumps(kwargs))}" if kwargs else ""
    again = f"shakedown agent run {args.target} --data {args.data}{given} --limit 1"
    about = {"target": args.target, "base_url": endpoint.base_url}
    verdict = replace(verdict, next=again if failed else "", extra={**about, **verdict.extra})
    return finish(with_findings(verdict, servers.findings()), paths.verdict, strict=args.strict)


def _checks(args: argparse.Namespace) -> int:
    from shakedown.agent_checks.checks import CheckPlan, CheckSettings, run_checks
    from shakedown.agent_checks.episode_source import training_settings
    from shakedown.agent_checks.results import checks_verdict, write_check_episodes
    from shakedown.agent_checks.server_probe import find_endpoint
    from shakedown.agents.episode_tag import HEADER
    from shakedown.inference.relay import relayed
    from shakedown.inference.server import in_use
    from shakedown.rollout.agent_sampler import agent_rows
    from shakedown.training.assets import heldout_source
    from shakedown.training.serving import order_of_run

    watch = Stopwatch()
    config = run_config(args.config)
    settings = CheckSettings(
        prompts=config.agents.prompts,
        group_size=config.agents.group_size,
        episode_timeout=args.episode_timeout or config.agents.episode_timeout,
        min_success_rate=config.agents.min_success_rate,
        share_tls=not args.separate_tls,
    )
    with (
        in_use(args.endpoint, lambda: order_of_run(config)) as served,
        relayed(served.base_url, served.api_key(), sticky=HEADER) as servers,
    ):
        rows = agent_rows(args.data or heldout_source(config), limit=settings.prompts)
        endpoint = find_endpoint(servers.url, served.served_name, served.api_key())
        training = training_settings(config, served.engine)
        agents = config.agents
        plan = CheckPlan(agents.target, rows, endpoint, settings, training, agents.kwargs)
        checks = asyncio.run(run_checks(plan, progress=lambda line: print(f"  {line}", flush=True)))
    paths = AgentsPaths(args.out)
    write_check_episodes(paths.episodes, checks)
    about = {"target": config.agents.target, "base_url": endpoint.base_url}
    verdict = with_findings(checks_verdict(checks, watch), servers.findings())
    verdict = replace(verdict, extra=about)
    return finish(verdict, paths.verdict, strict=args.strict)
