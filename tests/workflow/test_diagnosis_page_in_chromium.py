"""diagnosis.html in a real browser: 4 recorded ranks and 16,384 made ones."""

from pathlib import Path

import pytest

from shakedown.diagnosis.diagnose import diagnose_paths
from shakedown.report.diagnosis_page import render, write_page
from tests.hang_verdicts import large
from tests.workflow.test_report_in_chromium import (
    CHROMIUM,
    CONTRAST,
    SCHEMES,
    browse,
    console,
    probe,
)

CASE = Path(__file__).parents[1] / "data" / "hang_dumps" / "b_cond"
WIDTHS = """
  const copy = document.documentElement.cloneNode(true);
  copy.querySelectorAll("script").forEach((script) => script.remove());
  copy.querySelectorAll("details").forEach((details) => { details.open = true; });
  return [1280, 390].map((width) => {
    const frame = document.createElement("iframe");
    frame.style = `border: 0; width: ${width}px`;
    document.body.append(frame);
    frame.contentDocument.open();
    frame.contentDocument.write("<!doctype html>", copy.outerHTML);
    frame.contentDocument.close();
    const page = frame.contentDocument.documentElement;
    return [page.clientWidth, page.scrollWidth];
  });
"""

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module", params=["4 ranks", "16384 ranks"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "diagnosis.html"
    verdict = diagnose_paths([CASE]) if request.param == "4 ranks" else large()
    write_page(verdict, path)
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
    script = f"const fetched = {fetched}; return {{ fetched, widths: (() => {{ {WIDTHS} }})() }}"
    seen = probe(page, tmp_path / "profile", script, "--window-size=1400,900")
    assert seen == {"fetched": [], "widths": [[1280, 1280], [390, 390]]}


def test_a_script_that_slipped_into_the_page_does_not_run(tmp_path: Path) -> None:
    attack = "<script>document.title = 'owned'</script></main>"
    copy = tmp_path / "attacked.html"
    copy.write_text(render(large(4)).replace("</main>", attack), encoding="utf-8")
    done = browse(copy, tmp_path / "profile", "--dump-dom")
    assert "<title>owned" not in done.stdout
    assert "Content Security Policy" in "".join(console(done))
