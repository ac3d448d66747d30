"""The report in a real browser: both colour schemes, wide and narrow, without a network."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shakedown import cli
from shakedown.core.files import write_text
from shakedown.core.paths import RunPaths
from tests.workflow.report_run import write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--enable-logging=stderr"
).split()
# The browser's own curiosity stays on this machine, too.
FLAGS.append("--host-resolver-rules=MAP * ~NOTFOUND")
SCHEMES = {
    "dark": "--blink-settings=preferredColorScheme=0",
    "light": "--blink-settings=preferredColorScheme=1",
}

# WCAG 2.2, 1.4.3: 4.5 to 1, and 3 to 1 for large text. Backgrounds here are opaque colours.
CONTRAST = """
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const rgb = channels(getComputedStyle(node).backgroundColor);
      if (rgb.length === 3 || rgb[3] === 1) return rgb;
    }
    return [255, 255, 255];
  };
  for (const details of document.querySelectorAll("details")) details.open = true;
  const low = new Set();
  let checked = 0;
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
    if (!own || !node.getClientRects().length || node.tagName === "SCRIPT") continue;
    const style = getComputedStyle(node);
    const ink = channels(node instanceof SVGElement ? style.fill : style.color);
    const pair = [light(ink), light(ground(node))].sort();
    const ratio = (pair[1] + 0.05) / (pair[0] + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    checked += 1;
    if (ratio < (large ? 3 : 4.5)) low.add(`${node.tagName} ${node.className} ${ratio.toFixed(2)}`);
  }
  return { checked, low: [...low] };
"""

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module", params=["good", "hang"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    write_run(root, hang=request.param == "hang")
    assert cli.main(["report", str(root)]) == 0
    return RunPaths(root).report


def browse(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Open a page headless, with a profile of its own; the console goes to standard error."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def console(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def with_probe(page: Path, script: str) -> Path:
    """A copy of the page, its policy taken off, with one more script that says what it saw."""
    text = page.read_text(encoding="utf-8")
    policy = re.search(r"<meta http-equiv=[^>]*>", text)
    assert policy is not None
    text = text.replace(policy[0], "").replace("</body>", f"<script>{script}</script></body>")
    copy = page.with_name("probed.html")
    write_text(copy, text)
    return copy


def probe(page: Path, profile: Path, script: str, *flags: str) -> Any:
    """What `script` returns in the open page."""
    body = f"document.title = 'probe:' + JSON.stringify((() => {{ {script} }})())"
    dom = browse(with_probe(page, body), profile, "--dump-dom", *flags).stdout
    found = re.search(r"<title>probe:(.*?)</title>", dom)
    assert found is not None, dom[:2000]
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_opens_without_a_word_on_the_console(
    report: Path, tmp_path: Path, scheme: str
) -> None:
    done = browse(report, tmp_path / "profile", "--dump-dom", SCHEMES[scheme])
    assert console(done) == []
    assert "shakedown run report" in done.stdout
    assert done.stdout.count("<figure") >= 10


def test_a_script_that_slipped_into_the_page_does_not_run(report: Path, tmp_path: Path) -> None:
    text = report.read_text(encoding="utf-8")
    copy = report.with_name("attacked.html")
    attack = "<script>document.title = 'owned'</script></main>"
    write_text(copy, text.replace("</main>", attack))
    done = browse(copy, tmp_path / "profile", "--dump-dom")
    assert "<title>owned" not in done.stdout
    assert "Content Security Policy" in "".join(console(done))


def test_the_page_asks_for_nothing_beyond_itself(report: Path, tmp_path: Path) -> None:
    script = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    assert probe(report, tmp_path / "profile", script) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_has_the_contrast_that_wcag_asks_for(
    report: Path, tmp_path: Path, scheme: str
) -> None:
    low = probe(report, tmp_path / "profile", CONTRAST, SCHEMES[scheme])
    assert low["checked"] > 100
    assert low["low"] == []


def test_the_button_turns_the_scheme_round(report: Path, tmp_path: Path) -> None:
    script = """
      const ground = () => getComputedStyle(document.body).backgroundColor;
      const before = ground();
      document.getElementById("theme").click();
      const middle = ground();
      document.getElementById("theme").click();
      return [before, middle, ground()];
    """
    grounds = {}
    for scheme, flag in SCHEMES.items():
        before, middle, after = probe(report, tmp_path / scheme, script, flag)
        assert before == after != middle
        grounds[scheme] = before
    assert grounds == {"dark": "rgb(17, 19, 21)", "light": "rgb(246, 246, 243)"}


def test_the_crosshair_moves_the_charts_of_a_stage_together(report: Path, tmp_path: Path) -> None:
    script = """
      const section = document.getElementById("stage-grpo");
      const figures = [...section.querySelectorAll(".charts")][0].querySelectorAll("figure");
      const read = () => [...figures].map((f) => f.querySelector("figcaption p b").textContent);
      const svg = figures[0].querySelector("svg");
      const before = read();
      const box = svg.getBoundingClientRect();
      const middle = { clientX: box.left + box.width * 0.55, bubbles: true };
      svg.dispatchEvent(new PointerEvent("pointermove", middle));
      const during = read();
      svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      const next = read();
      svg.dispatchEvent(new PointerEvent("pointerleave"));
      return { before, during, next, after: read() };
    """
    seen = probe(report, tmp_path / "profile", script)
    assert seen["during"] != seen["before"] == seen["after"]
    reward, loss = seen["during"][:2]
    assert reward == loss
    assert int(seen["next"][0]) == int(reward) + 1


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_sideways(report: Path, tmp_path: Path, width: int) -> None:
    """In a frame, because a window is never narrower than 500 pixels."""
    script = f"""
      const copy = document.documentElement.cloneNode(true);
      copy.querySelectorAll("script").forEach((script) => script.remove());
      const frame = document.createElement("iframe");
      frame.style = "border: 0; width: {width}px";
      document.body.append(frame);
      frame.contentDocument.open();
      frame.contentDocument.write("<!doctype html>", copy.outerHTML);
      frame.contentDocument.close();
      const page = frame.contentDocument.documentElement;
      return [page.clientWidth, page.scrollWidth];
    """
    inner, needed = probe(report, tmp_path / "profile", script, "--window-size=1400,900")
    assert inner == width
    assert needed == inner


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_picture_can_be_taken(report: Path, tmp_path: Path, scheme: str) -> None:
    picture = tmp_path / "page.png"
    size = "--window-size=1280,1600"
    browse(report, tmp_path / "profile", size, SCHEMES[scheme], f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
