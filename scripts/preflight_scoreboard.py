"""Put real trouble on private Slurm clusters and score what preflight names for it.

    python scripts/preflight_scoreboard.py [--repeats N] [--out FILE] [--log FILE] [--no-runs]

Two clusters of five nodes one after the other: one whose nodes share this machine's network, one
whose nodes have a network each (root alone). Every trouble is put on one node of them N times, and
every fault that preflight can inject, up to three at a time. About 40 seconds a run. Writes
docs/preflight-scoreboard.md. --log: a line of JSON is added for everything that was scored; those
that are there already count, too, and --no-runs writes the page of them alone.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from preflight_troubles import CASES, WARNED, Case, injected_cases, preflight, private_site, told

from shakedown.core.files import json_as, write_text
from shakedown.core.verdict import Verdict

PAGE = Path(__file__).resolve().parents[1] / "docs" / "preflight-scoreboard.md"
_HEAD = """\
# Preflight's scoreboard

Written by `make preflight-scoreboard`: real trouble on one node (n3) of private Slurm clusters of
five nodes on one machine, whose nodes share its network or have a network namespace each. Injected
faults are up to three in one run, on different nodes. Right: exactly those at fault are named (an
injected fault: its node is, or is warned of). Innocent: a run that names somebody else, too. The
rest is "not sure". Seconds are those of preflight.
"""
_CLUSTERS = {"one network": False, "own networks": True}


@dataclass(frozen=True)
class Run:
    """One run: `right` of everything that was wrong with the nodes, innocents named beside it."""

    cluster: str
    trouble: str
    tier: str
    right: bool
    innocents: tuple[str, ...]
    seconds: float
    told: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and write the page; returns 1 where an innocent was named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of every trouble")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE", help="the page")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what was found, added to")
    parser.add_argument("--no-runs", action="store_true", help="the page of the log alone")
    arguments = parser.parse_args(argv)
    runs = []
    if arguments.log and arguments.log.exists():
        lines = arguments.log.read_text(encoding="utf-8").splitlines()
        runs = [json_as(Run, json.loads(line)) for line in lines]
    for run in _runs(0 if arguments.no_runs else arguments.repeats):
        runs.append(run)
        sign = (
            "RIGHT" if run.right else f"INNOCENT {run.innocents}" if run.innocents else "not sure"
        )
        print(f"{run.cluster}: {run.trouble}: {sign}, {run.seconds:.0f} s", flush=True)
        if arguments.log:
            with arguments.log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(asdict(run)) + "\n")
    write_text(arguments.out, page(runs))
    print(f"written: {arguments.out}")
    return 1 if any(run.innocents for run in runs) else 0


def _runs(repeats: int) -> Iterator[Run]:
    for cluster, own in _CLUSTERS.items() if repeats else ():
        with private_site(own_networks=own) as site:
            for turn in range(repeats):
                cases = [case for case in CASES if own or not case.needs_network]
                for case in [*cases, *injected_cases(turn)]:
                    verdict = preflight(site, case)
                    for name, right in _parts(case, verdict).items():
                        yield Run(
                            cluster,
                            name,
                            case.tier,
                            right,
                            tuple(case.innocents(verdict)),
                            verdict.seconds,
                            told(verdict),
                        )


def _parts(case: Case, verdict: Verdict) -> dict[str, bool]:
    """What is scored of a run: each injected fault for itself, by the node that has it."""
    if not case.faults:
        return {str(case).replace("_", " "): case.is_right(verdict)}
    bad = verdict.extra["bad_nodes"]
    warned = {finding.subject for finding in verdict.findings if finding.status == "warn"}
    pairs = (fault.split(":") for fault in case.faults)
    return {f"injected: {k}": node in (warned if k in WARNED else bad) for k, node in pairs}


def page(runs: Sequence[Run]) -> str:
    """The scoreboard as Markdown."""
    rows = defaultdict(list)
    for run in runs:
        rows[run.trouble, run.cluster].append(run)
    lines = [
        _HEAD,
        _total(runs),
        "",
        "| trouble | cluster | runs | right | innocent | median s | longest s |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for (trouble, cluster), some in rows.items():
        seconds = [run.seconds for run in some]
        lines.append(
            f"| {trouble} | {cluster} | {len(some)} | {sum(r.right for r in some)} | "
            f"{sum(bool(r.innocents) for r in some)} | {statistics.median(seconds):.0f} | "
            f"{max(seconds):.0f} |"
        )
    return "\n".join(lines) + "\n"


def _total(runs: Sequence[Run]) -> str:
    right, innocent = sum(r.right for r in runs), sum(bool(r.innocents) for r in runs)
    share = 100 * right / max(1, len(runs))
    return f"In all: {right} of {len(runs)} right ({share:.0f} %), an innocent named in {innocent}."


if __name__ == "__main__":
    sys.exit(main())
