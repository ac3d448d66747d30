"""The page of an agent's conversations in a real browser, hostile ones too."""

import json
from pathlib import Path

import pytest

from shakedown import cli
from shakedown.core.paths import RunPaths
from shakedown.core.verdict import read_verdict
from shakedown.report.episodes_page import write_page
from tests.unit.report.test_episodes_page import EVIL, call, line
from tests.workflow.report_run import write_run
from tests.workflow.test_report_in_chromium import CHROMIUM, CONTRAST, SCHEMES, browse, console
from tests.workflow.test_report_in_chromium import probe as probe_page

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    paths = RunPaths(tmp_path_factory.mktemp("run"))
    write_run(paths.root, hang=False)
    messages = [{"role": "user", "content": EVIL + "x" * 3000}]
    bad = [call(), call(messages=messages, error=EVIL, status=500, replies=[])]
    lines = [line(17, "exception", detail=EVIL, trace=EVIL * 20, calls=bad)]
    lines += [line(n, calls=[call(repeats=n)]) for n in range(60)]
    paths.agents.episodes.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    write_page(paths.agents, read_verdict(paths.agents.verdict))
    assert cli.main(["report", str(paths.root)]) == 0
    return paths


def test_conversations_open_without_a_script_a_request_or_a_word_on_the_console(
    run: RunPaths, tmp_path: Path
) -> None:
    done = browse(run.agents.page, tmp_path / "a", "--dump-dom")
    script = "return performance.getEntriesByType('resource').map((entry) => entry.name)"

    assert console(done) == []
    assert done.stdout.count("<script") == 0
    assert "row 17" in done.stdout
    assert probe_page(run.agents.page, tmp_path / "b", script) == []


def test_the_runs_page_and_the_conversations_lead_to_each_other(
    run: RunPaths, tmp_path: Path
) -> None:
    script = "return [...document.links].map((link) => link.href)"

    there = probe_page(run.report, tmp_path / "a", script)
    back = probe_page(run.agents.page, tmp_path / "b", script)

    assert run.agents.page.as_uri() in there
    assert run.report.as_uri() in back


@pytest.mark.parametrize("scheme", SCHEMES)
def test_conversations_have_contrast_and_stay_in_their_width(
    run: RunPaths, tmp_path: Path, scheme: str
) -> None:
    wide = "const page = document.documentElement; return [page.clientWidth, page.scrollWidth];"

    low = probe_page(run.agents.page, tmp_path / "a", CONTRAST, SCHEMES[scheme])
    inner, needed = probe_page(run.agents.page, tmp_path / "b", wide, "--window-size=500,900")

    assert low["checked"] > 100
    assert low["low"] == []
    assert needed == inner
