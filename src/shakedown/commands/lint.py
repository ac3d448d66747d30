"""`shakedown lint CONFIG...`: say what is wrong with a config before anything is started."""

import argparse
from pathlib import Path

from shakedown.config import dump_config, layers, load_config
from shakedown.core.verdict import Stopwatch, Verdict, finish, status_of
from shakedown.training.lint import faults_of, findings_of


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
    faults = len(faults_of(findings))
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
