"""`shakedown serve`: start, find, restart or stop a persistent inference server."""

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shakedown.cluster.nodes import read_bad_nodes
from shakedown.commands.arguments import (
    ActionParsers,
    above_zero,
    add_config,
    add_strict,
    given,
    place,
    run_action,
    run_config,
    whole,
)
from shakedown.core.errors import ExitCode, RefusedError, ShakedownError, UntrustedError, UsageError
from shakedown.core.paths import ServerPaths
from shakedown.core.verdict import Stopwatch, finish

if TYPE_CHECKING:
    from shakedown.inference.folder import ServerOrder, SlurmOptions

EXAMPLES = (
    "shakedown serve start --config config/config.yaml --out results/demo/serve/policy",
    "shakedown serve status results/demo/serve/policy",
)
run = run_action


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions: a server's life cycle, and the use of a running one."""
    actions = ActionParsers(parser)
    start = actions.add(
        "start",
        _start,
        "Start a server and write DIR/endpoint.json once it has answered a request.",
        EXAMPLES[0],
        "shakedown serve start --engine vllm --model ./my-model --out serve/mine",
    )
    start.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="the server's folder: its endpoint.json, log, verdict and secret",
    )
    _order_arguments(start)
    add_strict(start)
    for name, act, sentence, more in (
        ("status", _status, "Say whether the server runs and answers; exit 1 if not.", ""),
        ("ensure", _ensure, "Restart the server if it is gone.", " --config my.yaml"),
        ("stop", _stop, "Stop the server and make sure that all its processes are gone.", ""),
    ):
        folders = ("serve/mine", "/nfs/policy")
        examples = [f"shakedown serve {name} {folder}{more}" for folder in folders]
        each = actions.add(name, act, sentence, *examples)
        each.add_argument("folder", type=Path, help="the server's folder")
        if act is _ensure:  # for the restart: no command is read from the server's folder
            _order_arguments(each)
    _running_arguments(actions)


def _running_arguments(actions: ActionParsers) -> None:
    """Actions on a running server."""
    update = actions.add(
        "update-weights",
        _update_weights,
        "Load other weights of the same architecture and verify the answers.",
        "shakedown serve update-weights serve/mine ./checkpoint",
        "shakedown serve update-weights serve/mine/endpoint.json /nfs/step_100 --timeout 600",
    )
    update.add_argument("endpoint", type=Path, help="the server's folder, or its endpoint.json")
    update.add_argument("model", type=place, help="a Hugging Face folder that the server can read")
    update.add_argument(
        "--timeout", type=above_zero, default=120.0, help="time limit of one request in seconds"
    )
    metrics = actions.add(
        "metrics",
        _metrics,
        "Show requests, queue, cache and tokens per second.",
        "shakedown serve metrics serve/mine",
        "shakedown serve metrics serve/mine --seconds 10 --json",
    )
    metrics.add_argument("endpoint", type=Path, help="the server's folder, or its endpoint.json")
    metrics.add_argument(
        "--seconds", type=above_zero, default=1.0, help="seconds over which tokens are counted"
    )
    metrics.add_argument("--json", action="store_true", help="print JSON")


def _order_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, required=False, why="its `serve` section (the options below override it)")
    parser.add_argument(
        "--assets",
        type=Path,
        metavar="FILE",
        help="with --config: assets.json of `shakedown assets`, which names the model to serve",
    )
    _server_arguments(parser)
    _slurm_arguments(parser)


def _server_arguments(parser: argparse.ArgumentParser) -> None:
    """None means the config's value, or the engine's own."""
    parser.add_argument(
        "--engine",
        help="vllm, sglang, transformers (light, no log-probabilities), or external: an existing "
        "server at --url, which shakedown never starts or stops",
    )
    _external_arguments(parser)
    _model_arguments(parser)
    parser.add_argument(
        "--prefix",
        default="",
        help="command to put in front of the engine's, such as a container runtime's",
    )
    parser.add_argument("--extra-args", default="", help="more engine arguments, as one string")
    parser.add_argument(
        "--lease",
        type=float,
        help="seconds without use after which the server stops (default: the config's, or 900)",
    )
    parser.add_argument(
        "--ready-timeout",
        type=float,
        help="seconds within which it must answer (default: the config's, or 300)",
    )


def _external_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="URL of an external server, http://HOST:PORT, or several: URL,URL"
    )
    parser.add_argument(
        "--key-file",
        type=place,
        metavar="FILE",
        help="file with the external server's key, readable only by its owner",
    )
    parser.add_argument(
        "--key-env",
        metavar="NAME",
        help="environment variable with that key, instead of --key-file",
    )


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=place, help="a Hugging Face folder or a hub name")
    parser.add_argument("--served-name", default="policy", help="model name that clients ask for")
    parser.add_argument(
        "--host",
        default="",
        help="address to listen on (default: 127.0.0.1, or the node's in a Slurm job)",
    )
    parser.add_argument(
        "--port", type=whole(0, 65535), default=0, help="port to listen on; 0 picks a free one"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype (default: the config's, or float32)",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        help="longest sequence in tokens, prompt and answer (default: the config's, or 256)",
    )
    parser.add_argument(
        "--kv-cache-gb",
        type=float,
        help="GiB of key-value cache on machines without CUDA (default: the config's, or 1)",
    )
    parser.add_argument(
        "--allocation",
        help="engine and parallel sizes: vllm:d1t2 is 1 replica over 2 GPUs (docs/allocation.md)",
    )
    parser.add_argument("--seed", type=int, help="seed of the engine's sampling")
    parser.add_argument(
        "--logprobs",
        choices=("raw", "processed"),
        help="log-probabilities to report: the model's own, or those of the distribution that was "
        "sampled from (default: the config's, or raw)",
    )


def _slurm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        choices=("local", "slurm"),
        help="local: on this machine; slurm: in a job of its own (default: the config's, or local)",
    )
    parser.add_argument("--partition", help="partition of the server's job")
    parser.add_argument("--account", help="account of the server's job")
    parser.add_argument("--gpus", type=int, help="GPUs of the server's job")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs of the server's job")
    parser.add_argument(
        "--time-limit", default="", help="time limit of the server's job (default: the partition's)"
    )
    parser.add_argument("--gpu-model", help="GPU type, as the cluster names it")
    parser.add_argument(
        "--bad-nodes",
        type=Path,
        metavar="FILE",
        help="file with nodes that the job must avoid, as preflight writes it",
    )
    parser.add_argument("--sbatch-args", default="", help="more sbatch arguments, as one string")


def _start(args: argparse.Namespace) -> int:
    from shakedown.inference import verdict
    from shakedown.inference.server import start

    clock = Stopwatch()
    order = _order(args)
    try:
        found = verdict.started(start(order, args.out, say=_say), clock)
    # They say nothing about a server, so no verdict is written.
    except (UsageError, UntrustedError, RefusedError):
        raise
    except ShakedownError as error:
        # The verdict holds the first line; the rest, the end of the log, is for whoever watches.
        _, _, detail = str(error.args[0]).partition("\n")
        if detail:
            print(detail, file=sys.stderr, flush=True)
        found = verdict.not_started(order, error, args.out, clock)
    return finish(found, ServerPaths(args.out).verdict, strict=args.strict)


def _status(args: argparse.Namespace) -> int:
    from shakedown.inference.server import status

    found = status(args.folder)
    print(f"serve: {found.sentence}", flush=True)
    return int(ExitCode.OK if found.answers else ExitCode.FAIL)


def _ensure(args: argparse.Namespace) -> int:
    from shakedown.inference.server import ensure

    told = args.config or args.engine or args.model
    endpoint = ensure(args.folder, (lambda: _order(args)) if told else None, say=_say)
    print(f"serve: {endpoint.name} answers at {endpoint.base_url}", flush=True)
    return int(ExitCode.OK)


def _stop(args: argparse.Namespace) -> int:
    from shakedown.inference.server import stop

    print(f"serve: {args.folder} {stop(args.folder, say=_say)}", flush=True)
    return int(ExitCode.OK)


def _update_weights(args: argparse.Namespace) -> int:
    from shakedown.rollout.update import update_server
    from shakedown.rollout.weights import WeightUpdateError

    try:
        seconds = update_server(args.endpoint, args.model, within=args.timeout)
    except WeightUpdateError as error:  # judged by its answers and found wrong
        print(f"serve: FAIL: {error}", file=sys.stderr, flush=True)
        return int(ExitCode.FAIL)
    _say(f"serve: {args.endpoint} answers with the weights of {args.model} after {seconds:.1f} s")
    return int(ExitCode.OK)


def _metrics(args: argparse.Namespace) -> int:
    from shakedown.inference.folder import read_endpoint
    from shakedown.inference.metrics import metrics_table, watch_metrics

    told = watch_metrics(read_endpoint(args.endpoint), args.seconds)
    print(json.dumps(told) if args.json else metrics_table(told), flush=True)
    return int(ExitCode.OK)


def _order(args: argparse.Namespace) -> "ServerOrder":
    """The config's settings, overridden by the command line.

    Raises:
        UsageError: neither a config nor --engine and --model were given.
    """
    from shakedown.inference.engines import LaunchSpec
    from shakedown.inference.folder import ServerOrder
    from shakedown.training.assets import model_source
    from shakedown.training.serving import server_order

    if args.config:
        config = run_config(args.config)
        order = server_order(config, model_source(config, args.assets), engine=args.engine)
    elif args.engine and (args.model or args.url):
        spec = LaunchSpec(args.model or "", logprobs="raw")  # as the config's default
        order = ServerOrder(args.served_name, args.engine, spec)
    else:
        raise UsageError(
            "nothing to serve was given",
            hint="shakedown serve start --config FILE --out DIR, or --engine vllm --model FOLDER",
        )
    own = given(args, "model", "served_name", "dtype", "max_model_len", "kv_cache_gb")
    own |= given(args, "allocation", "seed", "host", "port", "logprobs")
    own |= {name: words for name in ("prefix", "extra_args") if (words := _words(args, name))}
    spec = replace(order.spec, **own)
    more = given(args, "engine", "lease", "ready_timeout", "launcher")
    more |= given(args, "url", "key_file", "key_env")
    return replace(order, **more, spec=spec, slurm=_slurm(order.slurm, args))


def _slurm(options: "SlurmOptions", args: argparse.Namespace) -> "SlurmOptions":
    return replace(
        options,
        **given(args, "partition", "account", "gpus", "gpu_model", "cpus", "time_limit"),
        exclude=",".join(read_bad_nodes(args.bad_nodes)) if args.bad_nodes else "",
        extra=_words(args, "sbatch_args"),
    )


def _words(args: argparse.Namespace, name: str) -> tuple[str, ...]:
    """An option that holds part of a command line, split as a shell would."""
    text: str = getattr(args, name)
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--{name.replace('_', '-')} {text!r}: {error}") from error


def _say(line: str) -> None:
    print(line, flush=True)
