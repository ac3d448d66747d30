"""The page itself: whole, self-contained, its links true, and deaf to hostile text."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from shakedown.core.errors import StorageError
from shakedown.core.files import write_json, write_text
from shakedown.core.outcome import Outcome
from shakedown.core.paths import RunPaths
from shakedown.core.verdict import Finding, Verdict
from shakedown.report.collect import collect
from shakedown.report.page import render_page, write_page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&{{ 7 * 7 }}"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Elements of a page, and a check that every one is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)

    def links(self) -> list[str]:
        return [str(attrs["href"]) for tag, attrs in self.elements if tag == "a"]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "demo run#1")


def write_verdict(path: Path, summary: str = "said", **more: Any) -> None:
    Verdict(**{"stage": "x", "status": "FAIL", "summary": summary, **more}).write(path)


def write_stage(paths: RunPaths, name: str = "grpo", **more: Any) -> Path:
    attempt = paths.stage(name).new_attempt()
    body = {"stage": name, "attempt": 1, "state": "hung", "sentence": "stopped", **more}
    Outcome(**body).write(attempt.outcome)
    return attempt.root


def page(paths: RunPaths) -> tuple[str, Page]:
    write_page(collect(paths.root), paths.report)
    text = paths.report.read_text(encoding="utf-8")
    return text, Page(text)


def write_hostile_run(paths: RunPaths) -> None:
    """Every text that a run can hold says the same evil thing."""
    finding = Finding(EVIL, "fail", "node", EVIL, EVIL, EVIL, EVIL, "code", [EVIL], EVIL)
    diagnosis = {
        "state": EVIL,
        "cause": EVIL,
        "pattern": EVIL,
        "culprits": {"ranks": [EVIL], "nodes": [EVIL], "roles": [EVIL]},
        "confidence": EVIL,
        "classes": [{"ranks": [1], "path": [EVIL], "waiting_in": EVIL}],
        "conflicts": [EVIL],
        "needed": [EVIL],
    }
    common: dict[str, Any] = {
        "findings": [finding],
        "metrics": {EVIL: 1.0},
        "versions": {EVIL: EVIL},
        "next": EVIL,
        "started": EVIL,
    }
    write_text(paths.config, f"run: {json.dumps(EVIL)}\n# {EVIL}\n")
    for step in (paths.preflight, paths.agents, paths.consistency):
        write_verdict(step.verdict, EVIL, **common)
    write_text(paths.preflight.bad_nodes, f"{EVIL}\n")
    write_json(paths.server("policy").endpoint, {"base_url": EVIL, EVIL: EVIL})
    exits: dict[str, Any] = {"exit_codes": {EVIL: EVIL}, "failed_component": EVIL, "started": EVIL}
    attempt = write_stage(paths, sentence=EVIL, steps=3, **exits)
    write_text(attempt / "logs" / "<b>&'.log", "x")
    stage = paths.stage("grpo")
    write_verdict(stage.diagnosis, EVIL, extra={"diagnosis": diagnosis}, **common)
    write_verdict(stage.accepted, EVIL, **common)
    write_text(stage.metrics, json.dumps({"step": 1, EVIL: 1.0, "loss": float("nan")}) + "\n")
    write_text(paths.stage("<i>x").root / "outcome.json", "{")


def test_hostile_text_stays_text_everywhere(paths: RunPaths) -> None:
    write_hostile_run(paths)
    text, parsed = page(paths)
    assert len(parsed.scripts) == 1
    assert text.count("</script>") == 1
    assert not any(tag in ("img", "iframe") for tag, _ in parsed.elements)
    assert not any(key.startswith("on") for _, attrs in parsed.elements for key in attrs)
    assert "alert(1)" in text
    assert "{{ 7 * 7 }}" in text


def test_the_checks_of_an_agent_are_one_table_with_hostile_names_escaped(paths: RunPaths) -> None:
    told = {f"{EVIL}_episodes": 1.0, f"{EVIL}_episodes_ok": 1.0, f"{EVIL}_failed_{EVIL}": 2.0}
    told |= {"single_episodes": 1.0, "single_episodes_ok": 1.0, "single_latency_p50_seconds": 0.25}
    write_verdict(paths.agents.verdict, metrics=told)

    text, parsed = page(paths)

    assert "<th>single</th>" in text
    assert ">250 ms</td>" in text
    assert len(parsed.scripts) == 1


def test_the_policy_admits_the_pages_own_script_and_no_other(paths: RunPaths) -> None:
    write_hostile_run(paths)
    text, parsed = page(paths)
    digest = base64.b64encode(hashlib.sha256(parsed.scripts[0].encode()).digest()).decode()
    policies = [a["content"] for t, a in parsed.elements if a.get("http-equiv")]
    assert f"script-src 'sha256-{digest}'" in str(policies[0])
    assert "default-src 'none'" in text


def test_nothing_is_loaded_from_a_network(paths: RunPaths) -> None:
    write_hostile_run(paths)
    text, parsed = page(paths)
    loading = [
        attrs.get("src") or attrs.get("href")
        for tag, attrs in parsed.elements
        if tag in ("script", "link", "img", "iframe", "use", "image", "source", "object", "embed")
    ]
    assert all(url is None or url.startswith(("#", "data:,")) for url in loading)
    assert "url(" not in text
    assert "@import" not in text


def test_every_link_leads_to_a_file_or_a_place_of_the_page(paths: RunPaths) -> None:
    write_hostile_run(paths)
    write_text(paths.consistency.page, "x")
    write_text(paths.stage("grpo").diagnosis_html, "x")
    _, parsed = page(paths)
    places = {f"#{attrs['id']}" for _, attrs in parsed.elements if "id" in attrs}
    assert "./../stages/grpo/diagnosis.html" in parsed.links()
    for link in parsed.links():
        if link.startswith("#"):
            assert unquote(link) in places
        else:
            assert (paths.report.parent / unquote(link)).exists(), link


def test_links_of_a_page_that_lies_elsewhere_still_lead_to_the_run(
    paths: RunPaths, tmp_path: Path
) -> None:
    write_verdict(paths.agents.verdict)
    out = tmp_path / "else" / "where" / "page.html"
    write_page(collect(paths.root), out)
    links = [x for x in Page(out.read_text(encoding="utf-8")).links() if not x.startswith("#")]
    assert links == ["./../../demo%20run%231/agents/verdict.json"]


def test_only_files_of_the_run_are_linked_as_evidence(paths: RunPaths, tmp_path: Path) -> None:
    inside = paths.root / "stages" / "log.txt"
    outside = tmp_path / "secret.txt"
    write_text(inside, "x")
    write_text(outside, "x")
    evidence = [str(inside), "stages/log.txt", str(outside), "../secret.txt", "javascript:alert(1)"]
    evidence += ["a\0b", "x" * 5000]
    write_verdict(paths.agents.verdict, findings=[Finding("c", "fail", evidence=evidence)])
    _, parsed = page(paths)
    linked = [link for link in parsed.links() if "log.txt" in link or "secret" in link]
    assert linked == ["./../stages/log.txt"] * 2
    assert not any("javascript" in link for link in parsed.links())


def test_a_diagnosis_links_files_of_its_attempt_with_their_lines(paths: RunPaths) -> None:
    attempt = write_stage(paths)
    write_text(attempt / "logs" / "a.log", "x")
    write_text(attempt / "evidence" / "b.json", "x")
    evidence = ["logs/a.log:12: rank 1 waits", "logs/a.log", "logs/none.log:3", "b.json"]
    finding = Finding("hang", "fail", evidence=evidence)
    write_verdict(paths.stage("grpo").diagnosis, findings=[finding])
    text, parsed = page(paths)
    link = "./../stages/grpo/attempts/001/logs/a.log"
    assert [x for x in parsed.links() if x == link] == [link] * 3
    assert "./../stages/grpo/attempts/001/evidence/b.json" in parsed.links()
    assert "stages/grpo/attempts/001/logs/a.log:12: rank 1 waits</a>" in text


def test_half_a_surrogate_pair_does_not_stop_the_page(paths: RunPaths) -> None:
    write_verdict(paths.agents.verdict)
    file = paths.agents.verdict
    write_text(file, file.read_text(encoding="utf-8").replace('"said"', '"a\\ud800b"'))
    text, _ = page(paths)
    assert "a?b" in text


def test_what_could_not_be_read_is_listed(paths: RunPaths) -> None:
    write_text(paths.agents.verdict, "{")
    text, _ = page(paths)
    assert "Files that could not be read" in text
    assert "agents/verdict.json" in text


def test_a_failed_stage_stands_first_and_its_sentence_on_top(paths: RunPaths) -> None:
    write_verdict(paths.preflight.verdict, "all nodes fit", status="PASS")
    write_stage(paths, steps=57)
    write_verdict(paths.stage("grpo").diagnosis, "rank 1 is culprit", next="do this")
    text, parsed = page(paths)
    sections = [a.get("id") for tag, a in parsed.elements if tag == "section" and a.get("id")]
    assert sections[0] == "stage-grpo"
    hero = text[text.index('class="hero fail"') : text.index("</section>")]
    assert "grpo hung at step 57" in hero
    assert "rank 1 is culprit" in hero
    assert "do this" in hero


def test_bad_findings_stand_before_good_ones_and_a_thousand_are_bounded(paths: RunPaths) -> None:
    findings = [Finding(f"check{i}", "pass", "node", f"n{i}") for i in range(1000)]
    findings += [Finding(f"bad{i}", "fail", "node", f"n{i}") for i in range(1000)]
    write_verdict(paths.preflight.verdict, findings=findings)
    text, _ = page(paths)
    assert text.index("bad0<") < text.index("check0<")
    assert text.count("800 more findings") == 2
    assert "1000 passed" in text


def test_versions_that_differ_between_stages_are_marked(paths: RunPaths) -> None:
    write_verdict(paths.preflight.verdict, versions={"torch": "2.13.0"})
    write_verdict(paths.agents.verdict, versions={"torch": "2.12.0"})
    text, _ = page(paths)
    assert "they differ between stages" in text
    assert "2.12.0" in text


def test_an_empty_run_has_a_page_too(paths: RunPaths) -> None:
    write_text(paths.config, "")
    text, _ = page(paths)
    assert "Not started" in text


def test_a_page_of_100_stages_and_100000_rows_stays_small(paths: RunPaths) -> None:
    for number in range(100):
        write_stage(paths, f"s{number:03d}")
    rows = (json.dumps({"step": s, "loss": 1 / s, "k3": s % 7}) for s in range(1, 100_001))
    write_text(paths.stage("s050").metrics, "\n".join(rows))
    text, parsed = page(paths)
    assert len(text) < 1_000_000
    assert sum(tag == "figure" for tag, _ in parsed.elements) == 2


def test_the_same_view_gives_the_same_page(paths: RunPaths) -> None:
    write_hostile_run(paths)
    view = collect(paths.root)
    assert render_page(view, paths.report.parent) == render_page(view, paths.report.parent)


def test_a_page_that_cannot_be_written_is_a_storage_error(paths: RunPaths) -> None:
    write_text(paths.config, "")
    write_text(paths.root / "report", "a file where the folder should be")
    with pytest.raises(StorageError, match="cannot write"):
        write_page(collect(paths.root), paths.report)
