"""`shakedown report RUN_DIR`: write one HTML page over all results of a run."""

import argparse
from pathlib import Path

from shakedown.core.errors import ExitCode
from shakedown.core.paths import RunPaths
from shakedown.report.collect import collect
from shakedown.report.page import write_page
from shakedown.report.summary import headline, workflow_steps

EXAMPLES = (
    "shakedown report results/demo",
    "shakedown report results/demo --out demo.html",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="the run's folder, results/<run>")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: RUN_DIR/report/index.html)"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the page is written: the page reports, the gates judge."""
    view = collect(args.run_dir)
    out = args.out or RunPaths(args.run_dir).report
    write_page(view, out)
    top = headline(view, workflow_steps(view))
    print(f"{view.name}: {top.state}: {top.title}")
    for item in view.unreadable:
        print(f"  unreadable: {item.path}: {item.reason}")
    print(f"  report: {out}", flush=True)
    return int(ExitCode.OK)
