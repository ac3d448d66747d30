"""`shakedown compare`: do trainer and inference engine agree on the same tokens?"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shakedown.commands.arguments import above_zero, number, positive
from shakedown.core.errors import BlockedError, UsageError, did_you_mean
from shakedown.core.files import read_object
from shakedown.core.verdict import Finding, Stopwatch, Verdict, finish
from shakedown.data_sources import read_rows

if TYPE_CHECKING:
    from shakedown.consistency.run import Plan

_ENGINES = ("vllm", "sglang")
_GRADES = ("dense", "moe", "fp8", "strict")


@dataclass(frozen=True)
class Server:
    """Where the engine answers: its URL without `/v1` and the model name to ask for."""

    url: str
    model: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """Number format and longest sequence of a checkpoint, in the engines' words."""

    dtype: str = "auto"
    positions: int = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two forms: --reference and --engine by hand, or --config with --endpoint of a run."""
    parser.add_argument("--reference", help="transformers:MODEL, a folder or a hub name")
    parser.add_argument("--engine", help="URL, vllm:MODEL or sglang:MODEL (started and ended)")
    parser.add_argument("--data", help="JSON lines, or hub:NAME[:SPLIT]")
    parser.add_argument("--config", nargs="+", type=Path, help="a run's YAML files")
    parser.add_argument("--endpoint", type=Path, help="endpoint.json of `shakedown serve`")
    parser.add_argument("--out", type=Path, default=Path("results/compare"), help="results folder")
    parser.add_argument("--limit", type=positive, help="use the first N rows")
    parser.add_argument("--max-tokens", type=positive, help="tokens a sample (64)")
    parser.add_argument("--temperature", type=number(0, 100), help="of the sampling (1)")
    parser.add_argument("--grade", choices=_GRADES, help="how strict to be (dense)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), help="of the reference (auto)"
    )
    parser.add_argument("--model", default="", help="served model name, if the server has several")
    parser.add_argument("--seed", type=int, help="of the bootstrap (0)")
    parser.add_argument("--concurrency", type=positive, default=64, help="requests at once")
    parser.add_argument(
        "--request-timeout", type=above_zero, default=300.0, help="seconds a request may take"
    )
    parser.add_argument(
        "--max-model-len", type=positive, default=4096, help="of a server that is started"
    )
    parser.add_argument(
        "--kv-cache-gb", type=above_zero, default=1.0, help="GiB, of a server without a GPU"
    )
    parser.add_argument("--strict", action="store_true", help="a WARN exits with 1")


def run(args: argparse.Namespace) -> int:
    """Compare and return the exit code."""
    watch = Stopwatch()
    try:
        return _compare(args, watch)
    except BlockedError as error:
        reason = error.args[0]
        blocked = Finding(check="compare", status="error", measured=reason, remedy=error.hint)
        verdict = Verdict(
            stage="consistency",
            status="BLOCKED",
            summary=reason,
            findings=[blocked],
            started=watch.started,
            seconds=watch.seconds,
            next=error.hint,
        )
        return finish(verdict, args.out / "verdict.json")


def _compare(args: argparse.Namespace, watch: Stopwatch) -> int:
    by_config = args.config is not None or args.endpoint is not None
    with _planned_by_config(args) if by_config else _planned_by_hand(args) as plan:
        from shakedown.consistency.run import compare
        from shakedown.consistency.write import make_verdict, write_tables
        from shakedown.report.comparison_page import write_report

        result = compare(plan, progress=_say)
    write_tables(result, args.out)
    verdict = make_verdict(result, watch)
    write_report(result, verdict, args.out)
    return finish(verdict, args.out / "verdict.json", strict=args.strict)


@contextlib.contextmanager
def _planned_by_hand(args: argparse.Namespace) -> "Iterator[Plan]":
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
    with _server(args) as server:
        yield _plan(args, server, reference=model, source=args.data, dtype="auto")


@contextlib.contextmanager
def _planned_by_config(args: argparse.Namespace) -> "Iterator[Plan]":
    """A run's own settings; options on the command line win."""
    from shakedown.commands.assets_file import heldout_source
    from shakedown.config import load_config
    from shakedown.inference.folder import ServerFolder
    from shakedown.inference.lease import Lease
    from shakedown.inference.server import ensure

    if args.config is None or args.endpoint is None:
        raise UsageError("--config and --endpoint belong together: one of them is missing")
    config = load_config(*args.config)
    served = ensure(args.endpoint)
    settings = config.consistency
    for name in ("max_tokens", "temperature", "grade"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(settings, name))
    args.limit = args.limit or settings.samples
    args.seed = config.seed if args.seed is None else args.seed
    source = args.data or heldout_source(config)
    reference = args.reference.partition(":")[2] if args.reference else served.model
    with Lease(ServerFolder(args.endpoint.parent).lease):
        server = Server(served.base_url, served.served_name)
        yield _plan(args, server, reference=reference, source=source, dtype=config.model.dtype)


def _plan(
    args: argparse.Namespace, server: Server, *, reference: str, source: str, dtype: str
) -> "Plan":
    rows = read_rows(source, limit=args.limit)
    from shakedown.consistency.run import Plan  # after the rows: it imports torch

    return Plan(
        url=server.url,
        model=server.model or args.model,
        reference=reference,
        rows=rows,
        dtype=args.dtype or dtype,
        max_tokens=64 if args.max_tokens is None else args.max_tokens,
        temperature=1.0 if args.temperature is None else args.temperature,
        grade=args.grade or "dense",
        seed=args.seed or 0,
        concurrency=args.concurrency,
        request_timeout=args.request_timeout,
    )


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[Server]:
    """A running server's URL as it is, or a server of our own for as long as it is needed."""
    given: str = args.engine
    if given.startswith(("http://", "https://")):
        yield Server(given.rstrip("/").removesuffix("/v1"))
        return
    kind, separator, model = given.partition(":")
    if kind not in _ENGINES or not separator or not model:
        raise UsageError(
            f"--engine {given!r}: expected a URL, {' or '.join(f'{e}:MODEL' for e in _ENGINES)}"
            f"{did_you_mean(kind, _ENGINES)}"
        )
    with _started(args, kind, model) as server:
        yield server


@contextlib.contextmanager
def _started(args: argparse.Namespace, engine: str, model: str) -> Iterator[Server]:
    """A server of our own, in the format of the reference, ended with the comparison."""
    from shakedown.inference.engines import LaunchSpec
    from shakedown.inference.folder import ServerFolder, ServerOrder
    from shakedown.inference.lease import Lease
    from shakedown.inference.server import start, stop

    checkpoint = _checkpoint(model)
    dtype = args.dtype if args.dtype not in (None, "auto") else checkpoint.dtype
    longest = min(args.max_model_len, checkpoint.positions)
    spec = LaunchSpec(model, dtype=dtype, max_model_len=longest, kv_cache_gb=args.kv_cache_gb)
    folder = args.out / "server"
    try:
        endpoint = start(ServerOrder("compare", engine, spec), folder, say=_say)
        with Lease(ServerFolder(folder).lease):
            yield Server(endpoint.base_url, endpoint.served_name)
    finally:
        if folder.is_dir():
            stop(folder, say=_say)


def _checkpoint(model: str) -> Checkpoint:
    """What a local checkpoint says of itself; a hub name is left to the engine."""
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        return Checkpoint()
    body = read_object(path, "model config")
    try:
        dtype = body.get("dtype") or body.get("torch_dtype") or "auto"
        positions = body.get("max_position_embeddings") or Checkpoint.positions
        return Checkpoint(str(dtype), int(positions))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is not a model config: {error}") from error


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)
