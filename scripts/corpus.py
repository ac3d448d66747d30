"""Diagnose every case of the corpus and count what is right: the judge of the diagnosis.

    python scripts/corpus.py [FOLDER...] [--split NAME] [--wrong] [--json FILE]

A case is a folder with `input/` and `truth.json`, which was written before the case was first
diagnosed: acceptable states and causes, whom the files alone convict, who may be named beside, and
the decisive fact, a pattern that a reader of the first screen has to find there (`decisive`).
A `.tar.gz` below a folder holds cases too, or is a recorded run of the scoreboard. Without a folder
all of tests/data/corpus and tests/data/scoreboard are judged. Exit 1 where an innocent was named.
"""

import argparse
import re
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from scoreboard_cases import CASES as INJECTED
from scoreboard_record import RESULT

from shakedown.core.errors import UsageError
from shakedown.core.files import read_object, write_json
from shakedown.core.paths import StagePaths
from shakedown.core.verdict import Verdict
from shakedown.diagnosis.analyze.model import State
from shakedown.diagnosis.diagnose import (
    diagnose_paths,
    diagnose_stage,
    newest_attempt,
    outcome_of,
)
from shakedown.report.diagnosis_terminal import render

DATA = Path(__file__).parents[1] / "tests" / "data"
FOLDERS = [DATA / "corpus", DATA / "scoreboard"]
KINDS = ("ranks", "nodes", "roles")
FIRST_SCREEN = 14  # lines of a terminal, below the command
BINS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Score:
    """What one diagnosis got right. `answer` is `right`, `unknown` or `wrong`.

    `shown`: the decisive fact stands on the first screen; None where the truth has none.
    """

    case: str
    group: str
    answer: str
    cause: bool
    exact: bool
    innocents: tuple[str, ...]
    confidence: float
    said: str
    shown: bool | None = None

    @property
    def silent(self) -> bool:
        """No cause is named, and what decides is not on the first screen either."""
        return self.answer == "unknown" and not self.shown


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    scores = judged(arguments.folders, arguments.split)
    if not scores:
        raise SystemExit(
            f"no case with a truth.json under {', '.join(map(str, arguments.folders))}"
        )
    if arguments.wrong:
        for score in scores:
            if score.answer == "wrong" or not score.exact or score.innocents or score.silent:
                print(f"{score.case}: {score.answer}: {score.said}")
    print(table(scores))
    print(reliability(scores))
    if arguments.json:
        write_json(arguments.json, {"scores": [asdict(score) for score in scores]})
    return 1 if any(score.innocents for score in scores) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folders", nargs="*", type=Path, default=FOLDERS)
    splits = ["", "tune", "held", "first", "second", "final"]
    parser.add_argument("--split", choices=splits, default="")
    parser.add_argument("--wrong", action="store_true", help="also print what is not right")
    parser.add_argument("--json", type=Path, help="write the score of each case")
    return parser


def judged(folders: Iterable[Path], split: str = "") -> list[Score]:
    """The scores of all cases below `folders`, of one split or of both."""
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for case in cases(folders, Path(temporary)):
            truth = read_truth(case)
            if split in ("", truth.get("split", "")):
                found.append(judge(case, truth))
    return found


def cases(folders: Iterable[Path], temporary: Path) -> Iterator[Path]:
    """The folders of all cases below `folders`; packed ones are laid out in `temporary`."""
    for folder in folders:
        for number, packed in enumerate(sorted(folder.rglob("*.tar.gz"))):
            if "input" in packed.relative_to(folder).parts:
                continue
            target = temporary / f"{folder.name}-{number}" / packed.name.removesuffix(".tar.gz")
            with tarfile.open(packed) as archive:
                archive.extractall(target, filter="data")
            yield from sorted(path.parent for path in target.rglob("truth.json"))
            if (target / RESULT).is_file():
                yield target
        yield from sorted(path.parent for path in folder.rglob("truth.json"))


def read_truth(case: Path) -> dict[str, Any]:
    """The truth of a case; of a recorded run what was injected into it."""
    if not (case / RESULT).is_file():
        return read_object(case / "truth.json", "truth")
    result = read_object(case / RESULT, "result")
    injected = next(row for row in INJECTED if row.name == result["case"])
    kind, _, number = result["culprit"].partition(" ")
    culprits = {
        "ranks": [int(number)] if kind == "rank" else [],
        "roles": [] if kind in ("rank", "nobody") else [kind],
    }
    return {
        "class": "recorded",
        "states": get_args(State),  # what was injected says nothing of how the run ended
        "causes": injected.causes,
        "culprits": culprits,
        "split": "tune",
    }


def judge(case: Path, truth: dict[str, Any]) -> Score:
    """Diagnose one case and compare the answer with its truth."""
    group = str(truth.get("class", case.parent.name))
    try:
        verdict = _diagnosed(case)
    except UsageError as error:
        verdict = None
        said: dict[str, Any] = {"cause": "unknown", "state": "unknown", "confidence": 0.0}
        summary = str(error)
    if verdict is not None:
        said, summary = verdict.extra["diagnosis"], verdict.summary
    innocents, missed = _named(said.get("culprits", {}), truth)
    cause = said["cause"] in truth["causes"]
    right = cause and not innocents and said["state"] in truth["states"]
    answer = "right" if right else "wrong"
    if said["cause"] == "unknown" and not right and not innocents:
        answer = "unknown"
    told = f"{said['state']} {said['cause']} {said['confidence']}: {summary[:300]}"
    return Score(
        case.name, group, answer, cause, not innocents and not missed, innocents,
        said["confidence"], told, _shown(verdict, truth),
    )  # fmt: skip


def _shown(verdict: Verdict | None, truth: dict[str, Any]) -> bool | None:
    """Whether the decisive fact stands in the first lines that a terminal shows."""
    if "decisive" not in truth:
        return None
    lines = render(verdict).splitlines()[:FIRST_SCREEN] if verdict is not None else []
    return re.search(truth["decisive"], "\n".join(lines), re.I) is not None


def _diagnosed(case: Path) -> Verdict:
    """A recorded run as its workflow does, anything else as its user would."""
    stages = case / "run" / "stages"
    if not stages.is_dir():
        return diagnose_paths([case / "input"])
    attempt = newest_attempt(StagePaths(next(stages.iterdir())))
    return diagnose_stage(attempt.root, outcome_of(attempt))


def _named(culprits: dict[str, Any], truth: dict[str, Any]) -> tuple[tuple[str, ...], list[str]]:
    """Who was named wrongly, and which culprit was not named."""
    innocents, missed = [], []
    for kind in KINDS:
        named = set(culprits.get(kind, ()))
        guilty = set(truth["culprits"].get(kind, ()))
        tolerated = set(truth.get("tolerated", {}).get(kind, ()))
        innocents += [f"{kind[:-1]} {name}" for name in sorted(named - guilty - tolerated, key=str)]
        missed += [f"{kind[:-1]} {name}" for name in sorted(guilty - named, key=str)]
    return tuple(innocents), missed


def table(scores: Sequence[Score]) -> str:
    """One row a class, and one for all."""
    groups: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        groups[score.group].append(score)
    head = (
        "class", "cases", "right", "unknown", "wrong", "cause", "exact", "innocents", "of", "shown",
        "silent",
    )  # fmt: skip
    rows = [(name, *_counts(rows)) for name, rows in sorted(groups.items())]
    return _aligned([head, *rows, ("all", *_counts(scores))])


def _counts(scores: Sequence[Score]) -> tuple[int, ...]:
    answers = [score.answer for score in scores]
    return (
        len(scores), *map(answers.count, ("right", "unknown", "wrong")),
        sum(score.cause for score in scores), sum(score.exact for score in scores),
        sum(bool(score.innocents) for score in scores),
        sum(score.shown is not None for score in scores),
        sum(bool(score.shown) for score in scores),
        sum(score.silent for score in scores if score.shown is not None),
    )  # fmt: skip


def reliability(scores: Sequence[Score]) -> str:
    """How often an answer was right, by the confidence that it was given with."""
    rows: list[tuple[object, ...]] = [("confidence", "answers", "right", "share")]
    told = [score for score in scores if score.answer != "unknown"]
    for low, high in zip(BINS, (*BINS[1:], 1.01), strict=True):
        found = [s for s in told if low <= s.confidence < high]
        if found:
            right = sum(s.answer == "right" for s in found)
            rows.append((f"{low}-{min(high, 1.0)}", len(found), right, f"{right / len(found):.2f}"))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[object]]) -> str:
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(str(v).ljust(w) for v, w in zip(r, widths, strict=True)) for r in rows]
    return "\n".join(line.rstrip() for line in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
