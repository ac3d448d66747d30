"""`shakedown compare`: do trainer and inference engine agree on the same tokens?"""

import argparse
import asyncio
import contextlib
import functools
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shakedown.cluster.folder_lease import hold
from shakedown.commands.arguments import (
    above_zero,
    add_config,
    add_strict,
    given,
    number,
    place,
    positive,
    run_config,
)
from shakedown.core.errors import CannotJudgeError, UsageError, did_you_mean
from shakedown.core.folders import remove_earlier
from shakedown.core.paths import ComparisonPaths
from shakedown.core.verdict import Stopwatch, finish, unknown_verdict, with_findings
from shakedown.data_sources import parse_source, read_rows

if TYPE_CHECKING:
    from shakedown.agents.reward_pool import RewardLimits
    from shakedown.consistency.plan import ComparisonPlan
    from shakedown.consistency.server import ComparedServer

EXAMPLES = (
    "shakedown compare --reference transformers:./my-model --engine vllm:./my-model"
    " --data prompts.jsonl --limit 64",
    "shakedown compare --config config/config.yaml"
    " --endpoint results/demo/serve/policy/endpoint.json --out results/demo/consistency",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two forms: --reference and --engine by hand, or a run's --config and --endpoint."""
    parser.add_argument(
        "--reference",
        type=place,
        metavar="transformers:MODEL",
        help="the trainer's side; MODEL is a checkpoint folder or a hub name (with --config: the "
        "served checkpoint)",
    )
    parser.add_argument(
        "--engine",
        type=place,
        help="the inference side: URL or URL,URL of running servers (their key: OPENAI_API_KEY), "
        "or vllm:MODEL or sglang:MODEL to start a server for the comparison",
    )
    parser.add_argument(
        "--data",
        type=place,
        help="rows with prompts: a file of JSON lines (images too: docs/consistency.md), or "
        "hub:NAME[:SPLIT] (with --config: the run's held-out rows)",
    )
    add_config(parser, required=False, why="its `consistency` section")
    parser.add_argument(
        "--endpoint",
        type=Path,
        metavar="FILE",
        help="endpoint.json of `shakedown serve`, instead of --engine (with --config)",
    )
    parser.add_argument("--out", type=Path, default=Path("results/compare"), help="results folder")
    parser.add_argument("--limit", type=positive, help="use the first N rows")
    _sampling_arguments(parser)
    _server_arguments(parser)
    parser.add_argument(
        "--reward",
        type=place,
        help="reward for the answers of both sides: a name or FILE.py:FUNCTION (default: the "
        "config's)",
    )
    parser.add_argument(
        "--compat",
        choices=("cmp_rollout",),
        help="end with the two lines that AReaL's cmp_rollout.py prints",
    )
    add_strict(parser)


def _server_arguments(parser: argparse.ArgumentParser) -> None:
    """How the inference side is asked, and what a server that compare starts is given."""
    parser.add_argument("--model", default="", help="served model name, if the server has several")
    parser.add_argument(
        "--concurrency", type=positive, default=128, help="requests in flight at once"
    )
    parser.add_argument(
        "--request-timeout",
        type=above_zero,
        default=300.0,
        help="time limit of one request in seconds",
    )
    parser.add_argument(
        "--max-model-len",
        type=positive,
        default=4096,
        help="longest sequence in tokens (for a server that compare starts)",
    )
    parser.add_argument(
        "--kv-cache-gb",
        type=above_zero,
        default=1.0,
        help="GiB of key-value cache (for a server that compare starts without a GPU)",
    )


def _sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """None means the config's value or, without a config, the default of `ComparisonPlan`."""
    parser.add_argument(
        "--max-tokens",
        type=positive,
        help="longest answer in tokens (default: the config's, or 64)",
    )
    parser.add_argument(
        "--temperature",
        type=number(0, 100),
        help="sampling temperature (default: the config's, or 1)",
    )
    parser.add_argument(
        "--grade",
        choices=("auto", "dense", "moe", "fp8", "strict"),
        help="which limits to judge by, see docs/consistency.md (default: the config's, or auto: "
        "by dtypes and measured noise)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="dtype of the reference; auto: the checkpoint's (default: the config's, or auto)",
    )
    parser.add_argument(
        "--engine-dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype that the server at --engine URL computes in, since servers do not report it; "
        "already known for servers that shakedown starts",
    )
    parser.add_argument(
        "--factors",
        choices=("auto", "all"),
        default="auto",
        help="possible causes to measure; auto: the costly ones only if the comparison does not "
        "pass; all: always every one",
    )
    parser.add_argument(
        "--trainer",
        help="also score with the forward pass of fsdp, megatron or archon, on one rank (with "
        "--config: the last stage's)",
    )
    parser.add_argument(
        "--seed", type=int, help="seed for resampling the intervals (default: the config's, or 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Compare and return the exit code."""
    watch = Stopwatch()
    with hold(args.out, "shakedown compare"):
        try:
            return _compare(args, watch)
        except CannotJudgeError as error:
            # Also written on failure: the workflow's gate reads the verdict in any case.
            verdict = unknown_verdict("consistency", "compare", error, watch)
            return finish(verdict, ComparisonPaths(args.out).verdict)


def _compare(args: argparse.Namespace, watch: Stopwatch) -> int:
    by_config = args.config is not None or args.endpoint is not None
    paths = ComparisonPaths(args.out)
    with _planned_by_config(args) if by_config else _planned_by_hand(args) as plan:
        # Torch takes seconds to load, so options and data are checked first.
        from shakedown.consistency.prompts import PromptMismatchError
        from shakedown.consistency.run import compare
        from shakedown.consistency.write import make_verdict, prompt_verdict
        from shakedown.report.comparison_page import write_report

        remove_earlier(paths.verdict, paths.page, paths.tokens, paths.samples)
        try:
            result = compare(plan, args.out, progress=_say)
        except PromptMismatchError as error:
            return finish(prompt_verdict(error, plan, watch), paths.verdict)
    verdict = with_findings(make_verdict(result, watch), plan.servers())
    write_report(result, verdict, args.out)
    code = finish(verdict, paths.verdict, strict=args.strict)
    if args.compat:
        from shakedown.consistency.accuracy import Paired, cmp_rollout

        greedy = result.accuracy.get("greedy", Paired())
        print(cmp_rollout(result.engine, greedy), flush=True)
    return code


def _again(args: argparse.Namespace) -> str:
    """The command line that `args` came from, for whoever continues after a stop."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["shakedown", "compare"]
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(args, name)
        if value != default:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


@contextlib.contextmanager
def _planned_by_hand(args: argparse.Namespace) -> "Iterator[ComparisonPlan]":
    from shakedown.consistency.server import OwnServer, check_engine, open_server

    for name in ("reference", "engine", "data"):
        if getattr(args, name) is None:
            raise UsageError(
                f"--{name} is missing",
                hint="shakedown compare --reference transformers:MODEL --engine URL --data FILE",
            )
    kind, _, model = args.reference.partition(":")
    if kind != "transformers" or not model:
        raise UsageError(
            f"--reference {args.reference!r}: expected transformers:MODEL"
            f"{did_you_mean(kind, ['transformers'])}"
        )
    own = OwnServer(
        ComparisonPaths(args.out).server, args.dtype, args.max_model_len, args.kv_cache_gb, _say
    )
    # Problems with any of them are reported before a server is started.
    check_engine(args.engine)
    plan = _plan(
        args,
        reference=model,
        source=args.data,
        limit=args.limit,
        reward=args.reward or "",
        trainer=args.trainer or "",
    )
    with open_server(args.engine, own) as server:
        yield _served(plan, server)


@contextlib.contextmanager
def _planned_by_config(args: argparse.Namespace) -> "Iterator[ComparisonPlan]":
    """A run's own settings, overridden by options on the command line."""
    from shakedown.agents.reward_pool import RewardLimits
    from shakedown.consistency.server import ComparedServer
    from shakedown.inference.relay import relayed
    from shakedown.inference.server import in_use
    from shakedown.training.assets import heldout_source
    from shakedown.training.forward import last_backend
    from shakedown.training.serving import order_of_run

    if args.config is None or args.endpoint is None:
        raise UsageError("--config and --endpoint belong together: one of them is missing")
    config = run_config(args.config)
    settings = {
        **config.consistency.model_dump(include={"max_tokens", "temperature", "grade"}),
        "limits": config.consistency.limits.model_dump(exclude_none=True),
        "dtype": config.model.dtype,
        "seed": config.seed,
    }
    with (
        in_use(args.endpoint, lambda: order_of_run(config)) as served,
        relayed(served.base_url, served.api_key()) as servers,
    ):
        plan = _plan(
            args,
            reference=args.reference.partition(":")[2] if args.reference else served.model,
            source=args.data or heldout_source(config),
            limit=args.limit or config.consistency.samples,
            settings=settings,
            reward=args.reward or config.data.reward,
            limits=RewardLimits(config.data.reward_timeout, config.data.reward_memory_gb),
            trainer=args.trainer or last_backend(config),
        )
        yield _served(plan, ComparedServer.of(served, servers.url, servers.findings))


def _plan(
    args: argparse.Namespace,
    *,
    reference: str,
    source: str,
    limit: int | None,
    settings: Mapping[str, Any] | None = None,
    reward: str = "",
    limits: "RewardLimits | None" = None,
    trainer: str = "",
) -> "ComparisonPlan":
    """The requested comparison, without a server yet."""
    from shakedown.consistency.plan import ComparisonPlan, check_reference
    from shakedown.training.forward import trainer_scores

    parsed = parse_source(source)
    rows = read_rows(source, limit=limit, images=True)
    reward = _usable_reward(args, reward, rows)
    check_reference(reference)
    own = given(args, "max_tokens", "temperature", "grade", "dtype", "seed")
    return ComparisonPlan(
        url="",
        model=args.model,
        reference=reference,
        rows=rows,
        concurrency=args.concurrency,
        request_timeout=args.request_timeout,
        again=_again(args),
        folder=None if parsed.hub else Path(parsed.place).parent,
        reward=functools.partial(_rewards, reward, limits) if reward else None,
        reward_name=reward,
        engine_dtype=args.engine_dtype or "",
        factors=args.factors,
        trainer=trainer_scores(trainer, reference) if trainer else None,
        trainer_name=trainer,
        **{**(settings or {}), **own},
    )


def _served(plan: "ComparisonPlan", server: "ComparedServer") -> "ComparisonPlan":
    return replace(
        plan,
        url=server.url,
        model=server.model or plan.model,
        api_key=server.api_key,
        servers=server.findings,
        engine_dtype=plan.engine_dtype or server.dtype,
        engine_weights=server.weights,
        engine_log=server.log,
    )


def _usable_reward(args: argparse.Namespace, reward: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The reward; None if no row has an answer and no reward was requested.

    Raises:
        UsageError: it was requested and cannot be used.
    """
    from shakedown.agents.reward_pool import reward_fault
    from shakedown.agents.rewards import get_reward, is_own
    from shakedown.consistency.answers import answer_of

    answered = any(answer_of(row) is not None for row in rows)
    if args.compat and not (reward and answered):
        raise UsageError(
            f"--compat {args.compat} prints accuracies: it needs --reward and rows with `answer`",
            hint="shakedown compare ... --reward exact_match",
        )
    if args.reward and not answered:
        raise UsageError(f"--reward {args.reward}: no row of the data has an `answer`")
    if not answered:
        return ""
    if is_own(reward):
        fault = asyncio.run(reward_fault(reward))
        if fault:
            raise UsageError(fault)
    elif reward:
        get_reward(reward)
    return reward


def _rewards(
    reward: str, limits: "RewardLimits | None", rows: Sequence[tuple[str, str, Mapping[str, Any]]]
) -> list[float | None]:
    """Run in its own process, as in training; None where it failed."""
    from shakedown.agents.reward_pool import RewardFailure, RewardLimits, score_rows

    found = asyncio.run(score_rows(reward, rows, limits or RewardLimits(), progress=lambda: None))
    return [None if isinstance(each, RewardFailure) else each for each in found]


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)
