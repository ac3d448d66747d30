"""`shakedown agent run` and `shakedown agent checks`: does an agent class survive real load?"""

import argparse
import asyncio
import functools
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shakedown.cluster.folder_lease import hold
from shakedown.commands.arguments import (
    ActionParsers,
    above_zero,
    add_config,
    add_debug,
    add_strict,
    debug_asked,
    key_values,
    number,
    place,
    positive,
    run_action,
    run_config,
    whole,
)
from shakedown.core.errors import ServerError, UsageError
from shakedown.core.paths import AgentsPaths
from shakedown.core.private import make_folders
from shakedown.core.verdict import Stopwatch, Verdict, finish, with_findings
from shakedown.debug import debug_settings

if TYPE_CHECKING:
    from shakedown.agent_checks.checks import CheckResult, CheckSettings
    from shakedown.agent_checks.episodes import RunResult
    from shakedown.agents.episode_lines import EpisodeLines
    from shakedown.config import AgentsConfig, GrpoConfig
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
    actions = ActionParsers(parser)
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
        help="constructor argument of the class, or a JSON object of several; repeatable",
    )
    run_parser.add_argument(
        "--base-url",
        metavar="URL",
        help="the server's URL, or URL,URL (default: OPENAI_BASE_URL; its key: OPENAI_API_KEY)",
    )
    add_config(
        run_parser,
        required=False,
        why="the sampling settings of the stage that trains with the agent",
    )
    run_parser.add_argument(
        "--concurrency", type=positive, default=64, help="episodes to run at once"
    )
    run_parser.add_argument("--group-size", type=positive, default=1, help="episodes per row")
    which = run_parser.add_mutually_exclusive_group()
    which.add_argument("--limit", type=positive, metavar="K", help="use only the first K rows")
    _row_arguments(run_parser, which)
    run_parser.add_argument(
        "--model", default="", help="model name given to the agent (default: the first one served)"
    )
    run_parser.add_argument(
        "--min-success-rate",
        type=number(0, 1),
        default=1.0,
        help="share of good episodes (0..1) needed to pass",
    )
    _common_arguments(run_parser)
    run_parser.add_argument(
        "--episode-timeout",
        type=above_zero,
        default=120.0,
        help="time limit of one episode in seconds",
    )
    _checks_arguments(actions)


def _checks_arguments(actions: ActionParsers) -> None:
    checks = actions.add(
        "checks",
        _checks,
        "Check a run's agent class: one episode, many at once, groups, the rollout controller.",
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
    _row_arguments(checks, checks)
    _common_arguments(checks)
    checks.add_argument(
        "--episode-timeout",
        type=above_zero,
        help="time limit of one episode in seconds (default: the config's)",
    )


def _row_arguments(parser: argparse.ArgumentParser, group: Any) -> None:
    """`group`: options that exclude each other."""
    group.add_argument(
        "--row",
        type=whole(0),
        metavar="N",
        help="use only this row (`row` in episodes.jsonl, counted from 0)",
    )
    parser.add_argument(
        "--repeat", type=positive, default=1, metavar="N", help="with --row: run it N times"
    )


def _rows(source: str, args: argparse.Namespace, limit: int | None) -> list[str]:
    """The rows to use, as JSON, each once.

    Raises:
        UsageError: there is no row of that number; --repeat without --row; as `agent_rows`.
    """
    from shakedown.rollout.agent_sampler import agent_rows

    if args.row is None and args.repeat > 1:
        raise UsageError("--repeat needs the row to repeat", hint="add --row N")
    if args.row is None:
        return agent_rows(source, limit=limit)
    rows = agent_rows(source, limit=args.row + 1)
    if len(rows) <= args.row:
        raise UsageError(f"--row {args.row}: {source} has {len(rows)} rows, numbered from 0")
    return rows[args.row :]


def _again(args: argparse.Namespace, command: Sequence[object], row: int) -> str:
    """The command that runs one row alone, with the same options and its own folder."""
    out = args.out / f"row-{row}" if args.row is None else args.out
    words = [*command, "--row", row, "--repeat", 1, "--out", out]
    if args.separate_tls:
        words.append("--separate-tls")
    if args.episode_timeout is not None:
        words += ["--episode-timeout", f"{args.episode_timeout:g}"]
    return shlex.join(["shakedown", "agent", args.action, *map(str, words)])


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("results/agent"), help="results folder")
    parser.add_argument(
        "--separate-tls",
        action="store_true",
        help="let each client build its own TLS context, as without shakedown",
    )
    add_strict(parser)
    add_debug(parser)


def _debugged(args: argparse.Namespace) -> bool:
    """Whether workers stop for debuggers, according to the environment they are started with."""
    if not debug_asked(args):
        return False
    from shakedown.core.folders import storage_errors
    from shakedown.debug.paused_processes import make_folder

    folder = AgentsPaths(args.out).debug
    with storage_errors("write", folder):
        make_folders(args.out)
        make_folder(folder)
    os.environ.update(debug_settings.environment(folder, "agent"))
    where = shlex.quote(str(args.out))
    print(f"agents will stop for a debugger: shakedown debug attach {where}", file=sys.stderr)
    return True


def _run(args: argparse.Namespace) -> int:
    from shakedown.agents.endpoint import HEADER
    from shakedown.inference.relay import relayed

    given = args.base_url or os.environ.get("OPENAI_BASE_URL", "")
    key = os.environ.get("OPENAI_API_KEY", "")
    with hold(args.out, "shakedown agent run"), relayed(given, key, sticky=HEADER) as servers:
        return _run_on(servers, args)


def _run_on(servers: "Servers", args: argparse.Namespace) -> int:
    from shakedown.agent_checks.early_end import exit_code
    from shakedown.agent_checks.episode_source import episode_source
    from shakedown.agent_checks.halt import Halt
    from shakedown.agent_checks.recordable import ask_recordable
    from shakedown.agent_checks.results import EpisodeWriter, run_verdict, unasked_verdict
    from shakedown.agent_checks.runner import RunSettings, run_episodes
    from shakedown.agent_checks.server_probe import ask_server, asked_first, find_endpoint

    watch = Stopwatch()
    kwargs = {key: value for given in args.kwargs for key, value in given.items()}
    rows = _rows(args.data, args, args.limit)
    sampling = _run_sampling(args)
    endpoint, paths = find_endpoint(servers.url, args.model), AgentsPaths(args.out)
    try:
        endpoint = asyncio.run(asked_first(endpoint))
    except (ServerError, UsageError) as error:
        with _lines(paths):  # of no episode
            told = servers.explained(error) if isinstance(error, ServerError) else error
            return _finish(unasked_verdict(told, watch), paths, args)
    recordable = asyncio.run(ask_recordable(endpoint, seconds=args.episode_timeout))
    opened = episode_source(
        args.target,
        endpoint,
        seconds=debug_settings.NO_TIMEOUT if _debugged(args) else args.episode_timeout,
        share_tls=not args.separate_tls,
        grpo=sampling if recordable.yes else None,
        own_lengths=not args.config,
        refused=recordable.refused,
        kwargs=kwargs,
    )

    halt = Halt(endpoint)

    async def run_rows() -> "RunResult":
        async with opened as source:
            with _lines(paths) as lines:
                on_end = functools.partial(
                    EpisodeWriter(lines, args.row or 0, len(rows)).add, "run"
                )
                settings = RunSettings(args.concurrency, args.group_size, on_end=on_end, halt=halt)
                with halt.signals():
                    return await run_episodes(source, rows * args.repeat, settings)

    total = len(rows) * args.repeat * args.group_size
    print(f"{total} episodes of {args.target}, {args.concurrency} at once", file=sys.stderr)
    result = asyncio.run(run_rows())
    failed = result.first_failed
    # Asked only after failures, which the server's state may explain; an empty URL asks nothing.
    server = asyncio.run(ask_server(endpoint.base_url if failed else "", endpoint.api_key))
    verdict = run_verdict(
        result, server, watch, recordable.findings(), min_success_rate=args.min_success_rate
    )
    again = _run_again(args, kwargs, (args.row or 0) + failed.group % len(rows)) if failed else ""
    about = {"target": args.target, "base_url": endpoint.base_url}
    verdict = replace(
        with_findings(verdict, servers.findings()), next=again, extra={**about, **verdict.extra}
    )
    return exit_code(halt.stop, _finish(verdict, paths, args))


def _run_sampling(args: argparse.Namespace) -> "GrpoConfig":
    """The sampling of the stage of `--config` that trains with the agent, else GRPO's defaults.

    Raises:
        ConfigError: as `load_config`.
    """
    from shakedown.agent_checks.episode_source import training_settings
    from shakedown.config import GrpoConfig
    from shakedown.rollout.agent_sampler import ENGINE

    found = training_settings(run_config(args.config), ENGINE, args.target) if args.config else None
    return found or GrpoConfig()


def _run_again(args: argparse.Namespace, kwargs: Mapping[str, Any], row: int) -> str:
    words: list[object] = [args.target, "--data", args.data]
    words += ["--kwargs", json.dumps(kwargs)] if kwargs else []
    words += ["--base-url", args.base_url] if args.base_url else []
    words += ["--model", args.model] if args.model else []
    words += ["--config", *args.config] if args.config else []
    return _again(args, words, row)


def _checks(args: argparse.Namespace) -> int:
    with hold(args.out, "shakedown agent checks"):
        return _run_checks(args)


def _run_checks(args: argparse.Namespace) -> int:
    from shakedown.agent_checks.checks import (
        CHECKS,
        ROW_CHECK,
        CheckPlan,
        run_checks,
    )
    from shakedown.agent_checks.early_end import exit_code
    from shakedown.agent_checks.episode_source import training_rule, training_settings
    from shakedown.agent_checks.halt import Halt
    from shakedown.agent_checks.results import EpisodeWriter, checks_verdict
    from shakedown.agent_checks.server_probe import find_endpoint
    from shakedown.agents.endpoint import HEADER
    from shakedown.inference.relay import relayed
    from shakedown.inference.server import in_use
    from shakedown.training.assets import heldout_source
    from shakedown.training.serving import order_of_run

    watch = Stopwatch()
    config = run_config(args.config)
    rule = training_rule(config)
    settings = _check_settings(args, config.agents)
    with (
        in_use(args.endpoint, lambda: order_of_run(config)) as served,
        relayed(served.base_url, served.api_key(), sticky=HEADER) as servers,
    ):
        rows = _rows(args.data or heldout_source(config), args, settings.prompts)
        endpoint = find_endpoint(servers.url, served.served_name, served.api_key())
        training = training_settings(config, served.engine)
        agents, paths = config.agents, AgentsPaths(args.out)
        with _lines(paths) as lines:
            writer, used = EpisodeWriter(lines, args.row or 0, len(rows)), rows * args.repeat
            halt = Halt(endpoint)
            plan = CheckPlan(
                agents.target,
                used,
                endpoint,
                settings,
                training,
                agents.kwargs,
                rule,
                writer.add,
                halt,
            )
            table = ROW_CHECK if args.row is not None else CHECKS

            async def run_all() -> "list[CheckResult]":
                with halt.signals():
                    return await run_checks(plan, progress=_say, table=table)

            checks = asyncio.run(run_all())
    failed = next((episode for check in checks if (episode := check.failed)), None)
    again = _checks_again(args, writer.row_of(failed)) if failed else ""
    about = {"target": config.agents.target, "base_url": endpoint.base_url}
    verdict = with_findings(checks_verdict(checks, watch), servers.findings())
    return exit_code(halt.stop, _finish(replace(verdict, next=again, extra=about), paths, args))


def _check_settings(args: argparse.Namespace, agents: "AgentsConfig") -> "CheckSettings":
    from shakedown.agent_checks.checks import CheckSettings

    settings = CheckSettings(
        prompts=agents.local_batch,
        group_size=agents.group_size,
        episode_timeout=args.episode_timeout or agents.episode_timeout,
        min_success_rate=agents.min_success_rate,
        share_tls=not args.separate_tls,
    )
    if not _debugged(args):
        return settings
    return replace(
        settings, episode_timeout=debug_settings.NO_TIMEOUT, batch_timeout=debug_settings.NO_TIMEOUT
    )


def _checks_again(args: argparse.Namespace, row: int) -> str:
    words: list[object] = ["--config", *args.config, "--endpoint", args.endpoint]
    words += ["--data", args.data] if args.data else []
    return _again(args, words, row)


def _finish(verdict: Verdict, paths: AgentsPaths, args: argparse.Namespace) -> int:
    from shakedown.report.episodes_page import write_page

    code = finish(verdict, paths.verdict, strict=args.strict)
    write_page(paths, verdict)
    print(f"  page: {paths.page}", flush=True)
    return code


def _lines(paths: AgentsPaths) -> "EpisodeLines":
    """A new episodes file; results of an older run do not stay beside it."""
    from shakedown.agents.episode_lines import EpisodeLines
    from shakedown.core.folders import remove_earlier

    remove_earlier(paths.verdict, paths.page)
    return EpisodeLines(paths.episodes)


def _say(line: str) -> None:
    print(f"  {line}", flush=True)
