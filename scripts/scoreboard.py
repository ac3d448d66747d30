"""Inject every cause of a hang into our own training runtime and score the diagnoses.

    python scripts/scoreboard.py [--only CASE...] [--seed N] [--out FILE]
                                 [--keep DIR] [--no-runs] [--record DIR]

Real stages (`shakedown train` of a tiny model on this machine's CPU, gloo), one after the other,
about 40 s each. All cases together write docs/scoreboard.md; with --only the page is printed,
unless --out is given. --keep: each case's folder stays in DIR; a run that is there, made by the
same code, is not made again, only diagnosed anew. --no-runs: that alone; others are not judged.
--record: what the diagnosis reads of each right case is packed into DIR; the tests replay it from
tests/data/scoreboard.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scoreboard_cases import CASES, Case, Result, confusion, draw
from scoreboard_record import RESULT, record
from scoreboard_run import (
    ROOT,
    STALL_SECONDS,
    CaseError,
    code_of_runs,
    judge_again,
    run_case,
    write_assets,
)

from shakedown.core.errors import UsageError, did_you_mean
from shakedown.core.files import json_as, read_object, write_json, write_text
from shakedown.core.verdict import installed_versions

PAGE = ROOT / "docs" / "scoreboard.md"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        cases = chosen(arguments.only)
        with tempfile.TemporaryDirectory(prefix="scoreboard-") as temporary:
            keep = arguments.keep or Path(temporary)
            results, failures = _run(
                cases, arguments.seed, keep.resolve(), arguments.record, make=not arguments.no_runs
            )
    except UsageError as error:
        print(f"scoreboard: {error}", file=sys.stderr)
        return 2
    text = page(results, seed=arguments.seed, failures=failures)
    out = arguments.out or (None if arguments.only else PAGE)
    if out is None:
        print(text)
    else:
        write_text(out, text)
        print(f"written: {out}")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="names of cases")
    parser.add_argument("--seed", type=int, default=0, help="draws the ranks and steps")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the evidence here")
    parser.add_argument("--no-runs", action="store_true", help="judge the kept runs alone")
    parser.add_argument("--record", type=Path, metavar="DIR", help="pack the right cases here")
    return parser


def chosen(names: Sequence[str]) -> list[Case]:
    """The cases of these names, or all.

    Raises:
        UsageError: no such case.
    """
    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise UsageError(
                f"no case {name!r}{did_you_mean(name, known)}; there are: {'; '.join(known)}"
            )
    return [known[name] for name in names] if names else list(CASES)


def _run(
    cases: Sequence[Case], seed: int, keep: Path, out: Path | None = None, *, make: bool = True
) -> tuple[list[Result], dict[str, str]]:
    results: list[Result] = []
    failures: dict[str, str] = {}
    for number, case in enumerate(cases, 1):
        try:
            result = _one(case, seed, keep, make=make)
            if out is not None and result.exact and result.cause_right:
                record(case, _folder(case, keep), out)
        except (CaseError, UsageError) as error:
            failures[case.name] = str(error)
            print(f"{number}/{len(cases)} {case.name}: not judged: {error}", flush=True)
            continue
        results.append(result)
        verdict = "exact" if result.exact else "FALSE BLAME" if result.false_blame else "not named"
        print(
            f"{number}/{len(cases)} {case.name}: {result.cause} ({verdict}): {result.sentence}",
            flush=True,
        )
    return results, failures


def _one(case: Case, seed: int, keep: Path, *, make: bool) -> Result:
    folder, drawn = _folder(case, keep), draw(case, seed)
    if (folder / RESULT).is_file():
        body = read_object(folder / RESULT, "result of a case")
        found = json_as(Result, body, unknown="ignore")
        if (found.rank, found.step, body.get("code")) == (drawn.rank, drawn.step, code_of_runs()):
            return judge_again(case, drawn, folder, found)
    if not make:
        raise CaseError("not run with this code")
    if folder.exists():
        shutil.rmtree(folder)
    assets = keep / "assets" / "assets.json"
    if not assets.is_file():
        write_assets(assets.parent)
    code = code_of_runs()
    result = run_case(case, drawn, folder, assets)
    write_json(folder / RESULT, {**result.to_json(), "code": code})
    return result


def _folder(case: Case, keep: Path) -> Path:
    # Paths stand in logs and command lines: a case's name would tell the answer.
    return keep / f"case-{CASES.index(case) + 1:02d}"


def page(results: Sequence[Result], *, seed: int, failures: dict[str, str]) -> str:
    """The Markdown page."""
    faults = [r for r in results if r.culprit != "nobody"]
    seconds = [r.seconds for r in faults if r.seconds is not None]
    versions = installed_versions("torch")
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    rows = [
        ("cases judged", f"{len(results)} ({len(faults)} faults)"),
        ("cause right", _share([r.cause_right for r in results])),
        ("exactly the culprit named, of the faults", _share([r.exact for r in faults])),
        ("an innocent named (false blame), of all", _share([r.false_blame for r in results])),
        ("seconds to the verdict, median / longest", _spread(seconds)),
    ]
    parts = [
        "# Scoreboard of the hang diagnosis",
        "`make scoreboard` injects each fault into a real stage of this training runtime (gloo on "
        "one machine's CPU, 4 ranks; GRPO: 2 ranks, orchestrator and a small server in SGLang's "
        "protocol) and compares the diagnosis with the truth. Rank and step are drawn by the "
        "seed. A case is one run: the figures say what works, not how often. NCCL, GPUs and "
        "several nodes are not in it.",
        f"Seed {seed}; {told}; stall timeout {STALL_SECONDS:.0f} s. All runs are of one state of "
        f"the code (fingerprint {code_of_runs()}, the diagnosis itself left out); kept runs are "
        "diagnosed anew, by rules that may have been fixed on them.",
        _table(("figure", "value"), rows),
        "Seconds count from the end of the stall timeout to the written diagnosis (confirmation, "
        "two samples 2 s apart and the ending of all processes are in it); where a stage ends by "
        "itself, from the fault.",
        "## Cases",
        _table(
            ("case", "rank, step", "cause", "diagnosed", "culprit", "named", "s"), _rows(results)
        ),
        "## Confusion",
        "Rows are the true causes, columns what was diagnosed.",
        _matrix(results),
    ]
    if failures:
        parts += ["## Not judged", _table(("case", "why"), list(failures.items()))]
    return "\n\n".join(parts) + "\n"


def _rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    return [
        (
            r.case,
            f"{r.rank}, {r.step}" if r.culprit.startswith("rank") else "-",
            f"`{r.truth}`",
            f"`{r.cause}`" + ("" if r.cause_right else " (wrong)"),
            r.culprit,
            _named(r) + (" (false)" if r.false_blame else ""),
            "-" if r.seconds is None else f"{r.seconds:.0f}",
        )
        for r in results
    ]


def _named(result: Result) -> str:
    named = [f"rank {rank}" for rank in result.ranks]
    return ", ".join([*named, *result.roles, *result.nodes]) or "nobody"


def _matrix(results: Sequence[Result]) -> str:
    counts = confusion(results)
    columns = sorted({found for _, found in counts})
    rows = [
        (f"`{truth}`", *(str(counts[truth, found] or "") for found in columns))
        for truth in sorted({truth for truth, _ in counts})
    ]
    return _table(("true", *(f"`{column}`" for column in columns)), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(c).replace("|", r"\|") for c in line) + " |" for line in lines
    )


def _share(values: Sequence[bool]) -> str:
    return f"{sum(values)} of {len(values)}"


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.0f} / {max(seconds):.0f}" if seconds else "-"


if __name__ == "__main__":
    sys.exit(main())
