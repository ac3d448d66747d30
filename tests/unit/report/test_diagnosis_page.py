"""diagnosis.html: what stands on it, how large it gets, and that it bears older verdicts."""

import dataclasses
import tarfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.paths import RunPaths
from shakedown.core.verdict import Finding, Verdict
from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.report.diagnosis_page import Origin, render
from shakedown.report.diagnosis_view import View
from shakedown.report.text import breakable
from tests.hang_verdicts import large

DATA = Path(__file__).parents[2] / "data"
HEALTHY: dict[str, Any] = {
    "state": "healthy",
    "cause": "healthy",
    "pattern": None,
    "culprits": {"ranks": [], "nodes": [], "roles": []},
    "confidence": 0.9,
    "classes": [],
    "wait_for": [],
    "conflicts": [],
    "needed": [],
}


def recorded(case: str, folder: Path) -> Verdict:
    """The diagnosis of a recorded run of the scoreboard."""
    with tarfile.open(DATA / "scoreboard" / f"{case}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return diagnose_paths([folder])


class Reader(HTMLParser):
    """Headings, text, and whether every element is closed."""

    VOID = frozenset({"meta", "br", "wbr"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.branches: list[bool] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [v or "" for k, v in attrs if k in ("src", "href") or k.startswith("on")]
        if "branch" in (given.get("class") or ""):
            self.branches.append("open" in given)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert attrs, f"empty <{tag}/>"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "h2":
            self.headings.append(data.strip())


@pytest.mark.parametrize("ranks", [4, 256, 16384, 100_000])
def test_page_stays_below_2_megabytes_and_is_well_formed(ranks: int) -> None:
    page = render(large(ranks))
    assert len(page.encode()) < 1_000_000
    reader = Reader(page)
    assert reader.open == []
    assert reader.links == []


def test_classes_that_alternate_rank_by_rank_keep_the_page_small() -> None:
    verdict = large()
    rows = verdict.extra["diagnosis"]["classes"]
    for number, row in enumerate(rows):
        row["ranks"] = list(range(number, 16384, 64))
    assert len(render(verdict).encode()) < 1_000_000


def test_sections_come_in_the_order_in_which_one_asks() -> None:
    reader = Reader(render(diagnose_paths([DATA / "hang_dumps" / "b_cond"])))
    assert reader.headings == [
        "What was seen",
        "What to do next",
        "Ranks by class",
        "Call paths, merged",
        "Who waits for whom",
        "Collectives around the break",
        "Evidence",
        "What speaks against it",
    ]
    text = " ".join(reader.text.split())
    assert text.index("culpritranks 0, 1") < text.index("What to do next")
    assert "rank 0: last call broadcast, number 5" in text


def test_only_the_culprits_branch_is_open() -> None:
    reader = Reader(render(large()))
    assert reader.branches[:2] == [True, True]
    assert not any(reader.branches[2:])


def test_classes_are_told_in_words_beside_their_colour() -> None:
    page = render(large(16))
    reader = Reader(page)
    assert page.count('class="cell culprit"') == 1
    assert 'title="rank 1, class A, culprit"' in page
    assert "gpu0001" in reader.text


def test_a_verdict_without_timeline_hosts_and_quotes_has_its_page() -> None:
    verdict = large(4)
    older = dataclasses.replace(verdict, extra={"diagnosis": verdict.extra["diagnosis"]})
    reader = Reader(render(older))
    assert reader.open == []
    assert "TORCH_FR_BUFFER_SIZE" in reader.text


def test_a_class_with_innocents_says_how_many_are_culprits() -> None:
    text = Reader(render(diagnose_paths([DATA / "fr_traces" / "lock_gil_1st"]))).text
    assert "2 of them culprits" in text


def test_hostile_names_of_hosts_groups_and_quotes_are_escaped() -> None:
    evil = "</style><script>alert(1)</script>\"'><img src=x onerror=y>"
    verdict = large(16)
    body = verdict.extra["diagnosis"]
    body["classes"][0]["path"] = [evil, f"f ({evil}.py:3)"]
    body["classes"][0]["waiting_in"] = evil
    body["wait_for"] = [{"from": evil, "to": "rank 1", "why": evil}]
    body["conflicts"] = body["needed"] = [evil]
    body["culprits"]["nodes"] = [evil]
    call = dict.fromkeys(("op", "sizes", "dtypes", "where", "state", "ranks"), evil)
    row = {"seq": 1, "calls": [call], "missing": evil}
    table = {"group": evil, "members": evil, "silent": evil, "break": 1, "rows": [row]}
    extra = {**verdict.extra, "timeline": [table], "hosts": {evil: "0-15"}}
    page = render(dataclasses.replace(verdict, summary=evil, extra=extra))
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("</style>") == 1
    reader = Reader(page)
    assert reader.open == []
    assert reader.links == []


def test_page_of_a_stage_names_it_and_leads_to_its_evidence_and_its_run(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "demo")
    attempt = run.stage("grpo").new_attempt()
    for path in (run.report, attempt.evidence / "round1" / "pyspy-1.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    outside = tmp_path / "secret"
    outside.touch()
    (attempt.evidence / "way-out").symlink_to(outside)
    verdict = large(16)
    evidence = ["round1/pyspy-1.json:3", "way-out", "../../../../../../secret", "x" * 3000]
    finding = dataclasses.replace(verdict.findings[0], evidence=evidence)
    verdict = dataclasses.replace(verdict, findings=[finding])

    page = render(verdict, Origin(attempt))

    assert "demo, stage grpo, attempt 1" in page
    assert '<a href="../../report/index.html">' in page
    assert '<a href="attempts/001/evidence/round1/pyspy-1.json">' in page
    assert page.count("<a href=") == 2


def test_page_of_a_hang_without_dumps_says_how_to_get_them_and_a_healthy_one_does_not() -> None:
    verdict = large(16)
    verdict = dataclasses.replace(verdict, extra={**verdict.extra, "timeline": []})
    assert "No Flight Recorder data" in render(verdict)
    for state in ("healthy", "slow", "exited"):
        verdict.extra["diagnosis"]["state"] = state
        assert "No Flight Recorder data" not in render(verdict)


def test_page_of_a_healthy_run_shows_nothing_as_if_it_were_missing(tmp_path: Path) -> None:
    page = Reader(render(recorded("finished-grpo", tmp_path)))
    assert page.headings == ["Evidence"]
    for told in ("no stack", "nobody is named", "Nothing in the inputs"):
        assert told not in page.text
    bare = Verdict("hang", "PASS", "30 steps", extra={"diagnosis": HEALTHY})
    page = Reader(render(bare))
    assert page.headings == []
    assert "0 pieces" not in page.text
    assert "not read" not in page.text


def test_what_healthy_ranks_did_is_folded_away_and_no_call_is_a_break(tmp_path: Path) -> None:
    page = render(recorded("healthy", tmp_path))
    assert '<details class="moment">' in page
    assert page.index('<details class="moment">') < page.index("Call paths, merged")
    assert "Collectives around the break" not in page
    assert '<span class="mark">' not in page
    assert Reader(page).open == []


def test_inputs_that_were_not_read_are_counted_in_words() -> None:
    unread = Finding("read", "skip", "config", "a.log", "empty")
    note = Finding("note", "pass", "config", "", "two attempts")
    verdict = large(4)
    for findings, told in (
        ([unread], "1 input was not read"),
        ([unread, unread, note], "2 inputs were not read, 1 note"),
        ([note], "1 note"),
    ):
        assert View(dataclasses.replace(verdict, findings=findings)).unread == told


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("at step (/srv/train/loop.py:3)", ["at step (/srv/", "train/", "loop.py:3)"]),
        ("all_reduce of <x>", ["all_reduce of &lt;x&gt;"]),
        ("PIPELINE_MODEL_PARALLEL_GROUP", ["PIPELINE_", "MODEL_", "PARALLEL_", "GROUP"]),
        ("Loader.__next__ (torch/data.py:1)", ["Loader.__next__ (torch/", "data.py:1)"]),
        ("a\x00b\u202e", ["a\\x00b\\u202e"]),
    ],
)
def test_paths_and_long_names_may_wrap_where_they_are_read_best(
    text: str, pieces: list[str]
) -> None:
    assert str(breakable(text)).split("<wbr>") == pieces
