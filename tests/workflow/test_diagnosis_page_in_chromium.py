"""diagnosis.html in a real browser, on a desk and on a phone: recorded hangs, a healthy run, and
thousands of made ranks.
"""

import tarfile
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.files import write_text
from shakedown.core.paths import RunPaths
from shakedown.core.verdict import Verdict
from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.report.diagnosis_page import Origin, render, write_page
from tests.hang_verdicts import large
from tests.workflow.test_report_in_chromium import (
    CHROMIUM,
    CONTRAST,
    SCHEMES,
    browse,
    console,
    probe,
)

DATA = Path(__file__).parents[1] / "data"
CASE = DATA / "hang_dumps" / "b_cond"
CASES = ("b_cond", "f_loader", "lock_gil_1st", "healthy", "1024 ranks", "16384 ranks", "many waits")
# A window is never narrower than 500 pixels, a frame may be.
FRAME = """
  const copy = document.documentElement.cloneNode(true);
  copy.querySelectorAll("script").forEach((script) => script.remove());
  copy.querySelectorAll("details").forEach((details) => { details.open = true; });
  const framed = (width) => {
    const frame = document.createElement("iframe");
    frame.style = `border: 0; height: 844px; width: ${width}px`;
    document.body.append(frame);
    frame.contentDocument.open();
    frame.contentDocument.write("<!doctype html>", copy.outerHTML);
    frame.contentDocument.close();
    return frame.contentDocument;
  };
"""
WIDTHS = """
  return [1280, 390].map((width) => {
    const page = framed(width).documentElement;
    return [page.clientWidth, page.scrollWidth];
  });
"""
# What lies inside a box that scrolls counts as out of sight, but for the drawing of the waits.
PHONE = """
  const page = framed(390);
  const small = new Set(), hidden = new Set(), narrow = [];
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode, parent = text.parentElement;
    if (!text.data.trim() || !parent.getClientRects().length || parent.closest("title")) continue;
    const scale = parent.ownerSVGElement ? parent.getScreenCTM().a : 1;
    const size = parseFloat(page.defaultView.getComputedStyle(parent).fontSize) * scale;
    if (size < 14) small.add(`${parent.tagName} ${size} ${text.data.trim()}`);
    const range = page.createRange();
    range.selectNodeContents(text);
    const box = range.getBoundingClientRect();
    if ((box.left < 0 || box.right > 390) && !parent.closest("svg")) hidden.add(text.data.trim());
  }
  for (const target of page.querySelectorAll("a[href], summary")) {
    const box = target.getBoundingClientRect();
    if (box.height < 24 || box.right > 390) narrow.push(target.textContent.trim());
  }
  const sentence = page.querySelector("h1").getBoundingClientRect();
  const culprit = page.querySelector(".box.culprit")?.getBoundingClientRect();
  return {
    width: page.documentElement.scrollWidth,
    small: [...small], hidden: [...hidden], narrow,
    sentence: [sentence.top, sentence.bottom],
    culprit: culprit ? [culprit.left, culprit.right] : [0, 0],
    links: page.querySelectorAll("a[href]").length,
    untitled: page.querySelectorAll(".waits g:not(:has(title, .dot))").length,
  };
"""

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


def verdict_of(case: str, folder: Path) -> Verdict:
    """The diagnosis of a recorded or of a made job."""
    if case == "many waits":
        verdict = large(64, classes=8)
        pairs = [(rank, rank * 7 % 40 + 1) for rank in range(40)]
        waits = [{"from": f"rank {a}", "to": f"rank {b}", "why": "dp"} for a, b in pairs]
        verdict.extra["diagnosis"]["wait_for"] = waits
        return verdict
    if case.endswith("ranks"):
        return large(int(case.split(maxsplit=1)[0]))
    if case == "healthy":
        with tarfile.open(DATA / "scoreboard" / "healthy.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        return diagnose_paths([folder])
    return diagnose_paths([next(DATA.glob(f"*/{case}"))])


@pytest.fixture(scope="module", params=CASES)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    path = folder / "diagnosis.html"
    write_page(verdict_of(request.param, folder), path)
    return path


def test_the_page_opens_without_a_word_on_the_console(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    size = "--window-size=1280,1600"
    done = browse(page, tmp_path / "profile", size, f"--screenshot={picture}")
    assert console(done) == []
    assert picture.stat().st_size > 50_000


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_has_the_contrast_that_wcag_asks_for(tmp_path: Path, scheme: str) -> None:
    page = tmp_path / "diagnosis.html"
    write_page(diagnose_paths([CASE]) if scheme == "dark" else large(), page)
    low = probe(page, tmp_path / "profile", CONTRAST, SCHEMES[scheme])
    assert low["checked"] > 50
    assert low["low"] == []


def test_nothing_sticks_out_sideways_and_nothing_is_fetched(page: Path, tmp_path: Path) -> None:
    fetched = "performance.getEntriesByType('resource').map((entry) => entry.name)"
    widths = f"(() => {{ {FRAME} {WIDTHS} }})()"
    script = f"const fetched = {fetched}; return {{ fetched, widths: {widths} }}"
    seen = probe(page, tmp_path / "profile", script, "--window-size=1400,900")
    assert seen == {"fetched": [], "widths": [[1280, 1280], [390, 390]]}


def test_a_phone_shows_it_all_in_a_size_that_can_be_read(page: Path, tmp_path: Path) -> None:
    seen = on_a_phone(page, tmp_path)
    assert seen["width"] <= 390
    assert seen["small"] == []
    assert seen["hidden"] == []
    assert seen["untitled"] == 0
    top, bottom = seen["sentence"]
    assert top < 120 < bottom < 844
    assert min(seen["culprit"]) >= 0
    assert max(seen["culprit"]) <= 390


def test_what_a_finger_touches_is_large_enough_on_a_phone(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "demo")
    attempt = run.stage("grpo").new_attempt()
    verdict = diagnose_paths([CASE])
    write_text(run.report, "")
    for name in ("fr_pkl_0", "pyspy_0.json"):
        write_text(attempt.evidence / "b_cond" / name, "")
    page = run.stage("grpo").diagnosis_html
    write_page(verdict, page, Origin(attempt))

    seen = on_a_phone(page, tmp_path)

    assert seen["links"] == 3
    assert seen["narrow"] == []


def on_a_phone(page: Path, folder: Path) -> Any:
    """What `PHONE` measures, all parts unfolded."""
    return probe(page, folder / "profile", FRAME + PHONE, "--window-size=1400,900")


def test_a_script_that_slipped_into_the_page_does_not_run(tmp_path: Path) -> None:
    attack = "<script>document.title = 'owned'</script></main>"
    copy = tmp_path / "attacked.html"
    copy.write_text(render(large(4)).replace("</main>", attack), encoding="utf-8")
    done = browse(copy, tmp_path / "profile", "--dump-dom")
    assert "<title>owned" not in done.stdout
    assert "Content Security Policy" in "".join(console(done))
