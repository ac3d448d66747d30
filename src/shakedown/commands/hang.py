"""`shakedown hang`: analyze files, collect evidence, diagnose a stage."""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from shakedown.commands.arguments import ActionParsers, place, run_action, whole
from shakedown.core.errors import ExitCode, UsageError
from shakedown.core.paths import AttemptPaths
from shakedown.core.visible import unguarded

if TYPE_CHECKING:
    from shakedown.core.outcome import Outcome
    from shakedown.core.paths import StagePaths
    from shakedown.core.verdict import Stopwatch, Verdict
    from shakedown.monitor.collect import Target


EXAMPLES = (
    "shakedown hang demo",
    "shakedown hang analyze results/demo/stages/grpo/latest/evidence",
)
run = run_action


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sub-commands; only the chosen one's modules are imported."""
    actions = ActionParsers(parser)
    _analyze_arguments(
        actions.add(
            "analyze",
            _analyze,
            "Work out from dumps and logs which ranks hang and why.",
            EXAMPLES[1],
            "shakedown hang analyze logs/ dumps/ --json diagnosis.json --html diagnosis.html",
        )
    )
    _brief_arguments(
        actions.add(
            "brief",
            _brief,
            "Print what dumps and logs show as short Markdown, to paste into an issue or a chat.",
            "shakedown hang brief evidence/",
            "shakedown hang brief slurm-4711.out dumps/",
        )
    )
    _collect_arguments(
        actions.add(
            "collect",
            _collect,
            "Sample running processes of this host, of a whole Slurm job, or of hosts over ssh.",
            "shakedown hang collect --job 1234 --out evidence",
            "shakedown hang collect --match train.py --hosts n1,n2 --out evidence",
        )
    )
    demo = actions.add(
        "demo",
        _demo,
        "Diagnose a recorded hang of four ranks; runs anywhere in about a second.",
        EXAMPLES[0],
        "shakedown hang demo --full",
    )
    demo.add_argument("--full", action="store_true", help="print everything instead of 25 lines")
    _diagnose_arguments(
        actions.add(
            "diagnose",
            _diagnose,
            "Diagnose a stage's newest attempt and save the diagnosis.",
            "shakedown hang diagnose --stage results/demo/stages/grpo",
            "shakedown hang diagnose --stage results/demo/stages/grpo --report-only",
        )
    )


def _brief_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="files and folders to read, recursively"
    )
    parser.add_argument(
        "--budget",
        type=whole(1, 1000),
        default=1,
        metavar="N",
        help="allow N times the usual 2 GiB of input, 60 s of CPU time and 900 MB of memory",
    )


def _analyze_arguments(parser: argparse.ArgumentParser) -> None:
    _brief_arguments(parser)
    parser.add_argument(
        "--json", type=place, metavar="FILE", help="write diagnosis.json to FILE ('-' prints it)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the HTML page to FILE")
    parser.add_argument("--strict", action="store_true", help="exit 1 if the job is merely slow")
    parser.add_argument("--full", action="store_true", help="print everything instead of 25 lines")


def _collect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pid", type=int, nargs="+", default=[], help="process ids")
    parser.add_argument(
        "--match", metavar="PATTERN", help="your processes whose command line matches"
    )
    parser.add_argument(
        "--attempt", type=Path, metavar="DIR", help="folder of an attempt with heartbeats"
    )
    parser.add_argument("--job", metavar="ID", help="running Slurm job, on all its nodes")
    parser.add_argument(
        "--hosts",
        metavar="HOSTS",
        help="with --match: over ssh on n1,n2 or @FILE (one host per line)",
    )
    parser.add_argument(
        "--remote-python",
        metavar="FILE",
        help="with --hosts: the Python there that has shakedown (default: this Python's path)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="evidence folder ('-' prints a tar archive)",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="also copy the ends of the logs in DIR"
    )
    parser.add_argument("--rounds", type=int, default=2, help="samples")
    parser.add_argument("--gap", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--native", action="store_true", help="also read C and C++ frames (py-spy)")
    parser.add_argument("--py-spy", action="store_true", help="use only py-spy to read stacks")
    parser.add_argument("--this-node", action="store_true", help="with --job: only this node")


def _diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stage", type=Path, required=True, metavar="DIR", help="results/<run>/stages/<stage>"
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 if the job is merely slow")
    parser.add_argument(
        "--report-only",
        action="store_true",
        help="exit 0 once the diagnosis is written (for a workflow with its own gate)",
    )


def _analyzed(args: argparse.Namespace) -> "Verdict":
    from shakedown.core.isolated import run_isolated
    from shakedown.diagnosis.diagnose import diagnose_paths
    from shakedown.diagnosis.read.budget import limits

    return run_isolated(
        partial(diagnose_paths, args.paths, args.budget),
        limits(args.budget),
        hint=f"give fewer inputs at a time, or --budget {2 * args.budget}",
    )


def _brief(args: argparse.Namespace) -> int:
    from shakedown.report.diagnosis_terminal import brief

    verdict = _analyzed(args)
    _write(brief(verdict), sys.stdout)
    return int(verdict.exit_code())


def _analyze(args: argparse.Namespace) -> int:
    verdict = _analyzed(args)
    if args.html is not None:
        from shakedown.report.diagnosis_page import write_page

        write_page(verdict, args.html)
    if args.json == "-":
        # Standard output is read by a program: print nothing but JSON.
        print(json.dumps(verdict.to_json(), indent=2, allow_nan=False))
        _print(verdict, sys.stderr, full=args.full)
        return int(verdict.exit_code(strict=args.strict))
    if args.json:
        verdict.write(Path(args.json))
    _print(verdict, sys.stdout, full=args.full)
    written = (("verdict", args.json), ("page", args.html))
    for name, path in written:
        if path:
            print(f"  {name}: {path}", flush=True)
    return int(verdict.exit_code(strict=args.strict))


def _demo(args: argparse.Namespace) -> int:
    from shakedown.core.paths import RunPaths
    from shakedown.diagnosis.diagnose import diagnose_paths

    with (
        tempfile.TemporaryDirectory(prefix="shakedown-demo-") as folder,
        resources.files("shakedown.diagnosis").joinpath("demo.tar.gz").open("rb") as packed,
        tarfile.open(fileobj=packed) as archive,
        contextlib.chdir(folder),  # evidence is shown as given, so paths are short here
    ):
        archive.extractall(folder, filter="data")
        attempt = RunPaths(Path("run")).stage("sft").attempt(1)
        verdict = diagnose_paths([attempt.root])
    # Nobody can continue the recorded run: show what a user of another trainer would run.
    own = replace(verdict, next="shakedown hang collect --match train.py --out evidence")
    _print(own, sys.stdout, full=args.full)
    return int(ExitCode.OK)


def _print(verdict: "Verdict", stream: TextIO, *, full: bool) -> None:
    """The diagnosis as text, as wide as the terminal, and in colour only on a terminal."""
    from shakedown.report.diagnosis_terminal import WIDTH, render

    # NO_COLOR set to anything disables colour (no-color.org); a `dumb` terminal would show the
    # codes.
    colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size((WIDTH, 40)).columns
    _write(render(verdict, width, full=full, colour=colour), stream)


def _write(text: str, stream: TextIO) -> None:
    """Text that lets no control characters of inputs through, in the stream's own encoding."""
    encoding = stream.encoding or "utf-8"  # characters that the terminal's encoding lacks become ?
    shown = text.encode(encoding, "replace").decode(encoding)
    print(shown, file=unguarded(stream), flush=True)


def _collect(args: argparse.Namespace) -> int:
    from shakedown.core.verdict import Stopwatch, finish

    watch = Stopwatch()
    if not (1 <= args.rounds <= 100 and 0 <= args.gap <= 3600):
        raise UsageError(
            f"--rounds {args.rounds} --gap {args.gap}: expected 1 to 100, and 0 to 3600 seconds"
        )
    _one_of(args)
    if args.hosts is not None:
        return _collect_hosts(args, watch)
    if args.job is not None and not args.this_node:
        return _collect_job(args, watch)
    if args.out == Path("-"):
        return _collect_to_output(args, watch)
    return finish(_collect_here(args, args.out, watch), None)


def _collect_here(args: argparse.Namespace, out: Path, watch: "Stopwatch") -> "Verdict":
    from shakedown.monitor.collect import collect_local, inside, missing_ranks
    from shakedown.monitor.collect.report import verdict_of

    targets = _targets(args)
    missed = [] if targets else ["no process was found"]
    if args.match is not None and inside.contained():
        missed.append("this is a container: processes outside it cannot be seen")
    logs = args.logs
    attempt = AttemptPaths(args.attempt) if args.attempt is not None else None
    first = os.environ.get("SLURM_PROCID", "0") == "0"  # of several nodes, one copies the logs
    if logs is None and attempt is not None and first and attempt.logs.is_dir():
        logs = attempt.logs
    # Finding no process is not an error: a node without any must not stop the others' collection.
    report = collect_local(
        targets,
        out,
        logs=logs,
        rounds=args.rounds,
        gap=args.gap,
        heartbeats=attempt.heartbeats if attempt is not None else None,
        native=args.native,
        always_pyspy=args.py_spy,
        missed=missed,
        # With --pid the user names the processes, with --attempt the heartbeats do.
        absent=missing_ranks(targets) if args.match or args.job else (),
    )
    return verdict_of(report, out, watch)


def _collect_to_output(args: argparse.Namespace, watch: "Stopwatch") -> int:
    """Write the evidence as a tar archive to standard output and messages to standard error."""
    from shakedown.core.leftovers import private_folder
    from shakedown.core.verdict import finish
    from shakedown.monitor.collect import archive

    output = unguarded(sys.stdout)
    if output.isatty():
        raise UsageError(
            "--out -: refusing to write an archive to a terminal",
            hint="... --out - | tar x -C evidence",
        )
    with private_folder("evidence") as folder, contextlib.redirect_stdout(sys.stderr):
        out = folder / "sampled"  # files beside it would be taken for the job's heartbeats
        code = finish(_collect_here(args, out, watch), None)
        archive.pack(out, output.buffer)
    return code


def _collect_job(args: argparse.Namespace, watch: "Stopwatch") -> int:
    from shakedown.core.verdict import finish
    from shakedown.monitor.collect.report import verdict_of_nodes
    from shakedown.monitor.collect.steps import collect_job
    from shakedown.slurm.records import check_job_id

    job_id = check_job_id(args.job)
    seconds = (args.rounds - 1) * args.gap
    report = collect_job(job_id, args.out, _sampling(args), seconds)
    return finish(verdict_of_nodes(report, f"job {job_id}", args.out, watch), None)


def _collect_hosts(args: argparse.Namespace, watch: "Stopwatch") -> int:
    from shakedown.core.verdict import finish
    from shakedown.monitor.collect import hosts
    from shakedown.monitor.collect.report import verdict_of_nodes

    names = hosts.parse_hosts(args.hosts)
    # With `=`, because a pattern may begin with a dash.
    options = [f"--match={args.match}", *_sampling(args)]
    options += [f"--logs={args.logs.absolute()}"] if args.logs is not None else []
    seconds = (args.rounds - 1) * args.gap
    python = args.remote_python or sys.executable
    report = hosts.collect_hosts(names, args.out, options, seconds, python)
    return finish(verdict_of_nodes(report, f"{len(names)} host(s)", args.out, watch), None)


def _sampling(args: argparse.Namespace) -> list[str]:
    """Sampling options for the collectors on other nodes."""
    options = ["--rounds", str(args.rounds), "--gap", str(args.gap)]
    return options + [
        *(["--native"] if args.native else []),
        *(["--py-spy"] if args.py_spy else []),
    ]


def _one_of(args: argparse.Namespace) -> None:
    given = [bool(args.pid), *(v is not None for v in (args.match, args.attempt, args.job))]
    if sum(given) != 1 or (args.this_node and args.job is None):
        raise UsageError(
            "choose the processes with one of --pid, --match, --attempt and --job",
            hint="shakedown hang collect --help",
        )
    if args.hosts is not None and args.match is None:
        raise UsageError(
            "--hosts requires --match: process ids differ from host to host, and --job asks Slurm "
            "for its own nodes",
            hint="shakedown hang collect --match train.py --hosts n1,n2 --out evidence",
        )
    several = args.hosts is not None or (args.job is not None and not args.this_node)
    if several and args.out == Path("-"):
        raise UsageError("--out -: several nodes need a folder", hint="--out evidence")


def _targets(args: argparse.Namespace) -> "list[Target]":
    from shakedown.monitor.collect import from_attempt, from_job, from_pattern, from_pids

    if args.pid:
        return from_pids(args.pid)
    if args.job is not None:
        return from_job(args.job)
    return from_pattern(args.match) if args.match is not None else from_attempt(args.attempt)


def _diagnose(args: argparse.Namespace) -> int:
    from shakedown.core.isolated import run_isolated
    from shakedown.core.paths import StagePaths
    from shakedown.core.verdict import finish
    from shakedown.diagnosis.diagnose import diagnose_stage, newest_attempt, outcome_of
    from shakedown.diagnosis.read.budget import limits
    from shakedown.report.diagnosis_page import Origin, write_page

    stage = StagePaths(args.stage)
    attempt = newest_attempt(stage)
    verdict = run_isolated(
        partial(diagnose_stage, attempt.root, outcome_of(attempt)),
        limits(),
        hint=f"shakedown hang analyze --budget 2 {attempt.evidence}",
    )
    write_page(verdict, stage.diagnosis_html, Origin(attempt))
    _remember_nodes(verdict, stage, outcome_of(attempt))
    code = finish(verdict, stage.diagnosis, strict=args.strict)
    print(f"  page: {stage.diagnosis_html}", flush=True)
    return int(ExitCode.OK) if args.report_only else code


# Causes in the machine: the same stage may well complete on another node.
_OF_THE_NODE = ("node_dead", "gpu_error")


def _remember_nodes(verdict: "Verdict", stage: "StagePaths", outcome: "Outcome | None") -> None:
    """Record a stage's faulty node: the next try avoids it like one that preflight refused."""
    from shakedown.commands.arguments import run_config
    from shakedown.core.paths import RunPaths
    from shakedown.preflight.history import NodeLook, exclude_known, remember
    from shakedown.slurm.hostlist import is_node_name

    found = verdict.extra["diagnosis"]
    ranks, nodes = (found["culprits"][kind] for kind in ("ranks", "nodes"))
    if found["cause"] not in _OF_THE_NODE:
        return
    # Slurm's node names, which may differ from the hosts' own names.
    where = outcome.rank_nodes if outcome is not None else ()
    named = [where[rank] for rank in ranks if rank < len(where)] or nodes
    nodes = sorted({node for node in named if is_node_name(str(node))})
    run = RunPaths(stage.root.parent.parent)
    if not nodes or not run.config.is_file():
        return
    now = time.time()
    reason = f"{found['cause']} in stage {stage.root.name}"
    looks = [NodeLook(now, run.root.name, node, ok=False, reason=reason) for node in nodes]
    remember(run.node_history, looks)
    exclude_known(
        run.node_history, run_config([run.config]).preflight.exclude_hours, run.excluded_nodes
    )
    print(f"hang: later jobs avoid {', '.join(nodes)} (shakedown preflight history)", flush=True)
