"""Run faulty agents and wires before a real vLLM, and score what `shakedown agent` names.

    python scripts/agent_scoreboard.py [--case TEXT...] [--out FILE] [--work FOLDER]

One server for all cases. Writes docs/agent-scoreboard.md. --case: only those whose names contain
one of TEXT, and no page.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agent_cases import CASES, Case
from agent_troubles import Outcome, ran

from shakedown.core.files import write_text
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import ServerOrder
from shakedown.inference.server import start, stop
from shakedown.training.demo import write_model

PAGE = Path(__file__).resolve().parents[1] / "docs" / "agent-scoreboard.md"
_HEAD = """\
# The scoreboard of agents

Written by `make agent-scoreboard`: agents as users write them, most with one fault each, and a
wire in trouble, run by `shakedown agent run`, the last ones by `shakedown agent checks`, against a
real vLLM on a CPU with the demo's random model, once each. The truth of each was written before its
first run. Right: the status is one of those expected, all findings that must be there are there, no
other cause of failure is, findings say the words in quotation marks, and as many episodes came
through as must. The wire's trouble is made by a relay before vLLM.
Seconds are those of the command, with its start.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and write the page; returns 1 where a case is not right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", metavar="TEXT", help="only cases named so")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE", help="the page")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep what was run here")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="agents-") as temporary:
        root = arguments.work or Path(temporary)
        wanted = arguments.case or [""]
        cases = [c for c in CASES.values() if any(text in c.name for text in wanted)]
        runs = _runs(cases, root)
    if not arguments.case:
        write_text(arguments.out, page(runs))
        print(f"written: {arguments.out}")
    return 0 if all(outcome.is_right(case) for case, outcome in runs) else 1


def _runs(cases: Sequence[Case], root: Path) -> list[tuple[Case, Outcome]]:
    root.mkdir(parents=True, exist_ok=True)
    write_model(root / "model", seed=0)
    spec = LaunchSpec(str(root / "model"), dtype="float32", kv_cache_gb=0.25, max_model_len=512)
    server = root / "server"
    endpoint = start(ServerOrder("policy", "vllm", spec, lease=3600.0), server, say=print)
    runs = []
    try:
        for case in cases:
            outcome = ran(case, endpoint, root)
            sign = "RIGHT" if outcome.is_right(case) else "WRONG"
            print(f"{sign}: {case.name}: {outcome.status} {list(outcome.named)}", flush=True)
            print(f"  {outcome.seconds:.0f} s, {outcome.good} good; {outcome.summary}", flush=True)
            runs.append((case, outcome))
    finally:
        stop(server, say=print)
    return runs


def page(runs: Sequence[tuple[Case, Outcome]]) -> str:
    """The scoreboard as Markdown."""
    right = sum(outcome.is_right(case) for case, outcome in runs)
    lines = [
        _HEAD,
        f"In all: {right} of {len(runs)} right.",
        "",
        "| fault | expected | found | right | s |",
        "| --- | --- | --- | --- | --: |",
    ]
    for case, outcome in runs:
        sign = "yes" if outcome.is_right(case) else "no"
        lines.append(
            f"| {case.name} | {_said(' or '.join(case.status), case.named, case.words)} | "
            f"{_said(outcome.status, outcome.named)} | {sign} | {outcome.seconds:.0f} |"
        )
    for case, outcome in runs:
        if not outcome.is_right(case):
            lines += ["", f"Not right, {case.name}: {' '.join(outcome.summary.split())[:300]}"]
    return "\n".join(lines) + "\n"


def _said(status: str, named: Sequence[str], words: Sequence[str] = ()) -> str:
    return ", ".join([status, *(f"`{each}`" for each in named), *(f'"{each}"' for each in words)])


if __name__ == "__main__":
    sys.exit(main())
