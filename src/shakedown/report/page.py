"""The run's page: one HTML file without network access, with only its own script and relative
links."""

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment

from shakedown import __version__
from shakedown.core import files
from shakedown.core.paths import (
    AgentsPaths,
    AttemptPaths,
    ComparisonPaths,
    PreflightPaths,
    ServerPaths,
    StagePaths,
)
from shakedown.report import charts, facts, text
from shakedown.report.charts import Chart
from shakedown.report.facts import DiagnosisFacts, Figure
from shakedown.report.summary import WorkflowStep, headline, workflow_steps, worst
from shakedown.report.text import page_environment
from shakedown.report.view import AttemptView, RunView, ServerView, StageState, StageView

Link = tuple[str, str]

# Sections in these states come first; otherwise sections keep the workflow's order.
_FIRST = ("FAIL", "UNKNOWN", "RUNNING")
# A longer workflow shows one state per stage, not one per gate.
_DENSE = 12
_MARKS = {"completed": "pass", "hung": "fail", "failed": "fail", "interrupted": "blocked"}


@dataclass(frozen=True)
class PageSection:
    """One section of the page: a check, or a training stage with its three steps."""

    name: str
    anchor: str
    state: StageState
    steps: Sequence[WorkflowStep]
    links: Sequence[Link] = ()
    stage: StageView | None = None
    server: ServerView | None = None
    figures: Sequence[Figure] = ()
    diagnosis: DiagnosisFacts = field(default_factory=DiagnosisFacts)
    charts: Sequence[Chart] = ()
    other_charts: Sequence[Chart] = ()
    columns_left_out: int = 0

    @property
    def sentence(self) -> str:
        told = [step.sentence for step in self.steps if step.state == self.state]
        return next((sentence for sentence in told if sentence), "")


def write_page(view: RunView, out: Path) -> None:
    """Write the page atomically.

    Raises:
        StorageError: the folder cannot be written or the file system is full.
    """
    html = render_page(view, out.parent)
    # JSON may contain half a surrogate pair, and a file name any byte: neither is UTF-8.
    files.write_text(out, html.encode("utf-8", "replace").decode("utf-8"))


def render_page(view: RunView, folder: Path) -> str:
    """The page as text; its links are relative to `folder`, where it will be."""
    environment = _environment(view.root, folder)
    steps = workflow_steps(view)
    groups = _groups(view, steps, folder)
    top = headline(view, steps)
    found = facts.versions(view)
    script = environment.get_template("script.js").render()
    return environment.get_template("index.html").render(
        view=view,
        headline=top,
        hero_links=_hero_links(groups, top.anchor) if top.state not in ("PASS", "NOT RUN") else [],
        groups=groups,
        dense=len(groups) > _DENSE,
        sections=sorted(groups, key=lambda group: group.state not in _FIRST),
        versions=found,
        versions_differ=any(len(seen) > 1 for seen in found.values()),
        now_iso=datetime.fromtimestamp(view.now, UTC).isoformat(timespec="seconds"),
        now_text=text.clock_of(view.now),
        script_hash=_content_hash(script),
        shakedown_version=__version__,
    )


def _environment(root: Path, folder: Path) -> Environment:
    environment = page_environment()
    for function in (text.number, text.duration, text.clock, text.size, text.shorten, text.plural):
        environment.filters[function.__name__] = function
    environment.globals |= {
        "slug": _slug,
        "href": lambda path: _href(path, folder),
        "evidence": _evidence(root, folder),
        "split_findings": facts.split_findings,
        "bad_exits": facts.bad_exits,
        "check_table": facts.check_table,
        "server_facts": facts.server_facts,
        "outcome_mark": _outcome_mark,
        "chart_data": _chart_data,
        "plot": charts.PLOT,
    }
    return environment


def _groups(view: RunView, steps: Sequence[WorkflowStep], folder: Path) -> list[PageSection]:
    servers = {f"serve-{server.name}": server for server in view.servers}
    groups = []
    for anchor, part in groupby(steps, key=lambda step: step.anchor):
        own = list(part)
        stage, server = own[0].stage, servers.get(anchor)
        if stage is not None:
            groups.append(_stage_group(stage, anchor, own, folder))
            continue
        home = server.root if server else view.root / anchor
        links = _links(_step_files(home), folder)
        groups.append(PageSection(own[0].name, anchor, own[0].state, own, links, server=server))
    return groups


def _stage_group(
    stage: StageView, anchor: str, steps: Sequence[WorkflowStep], folder: Path
) -> PageSection:
    columns = facts.columns(stage)
    others, left_out = charts.other_charts(columns)
    return PageSection(
        name=stage.name,
        anchor=anchor,
        state=worst([step.state for step in steps]),
        steps=steps,
        links=_links(_stage_files(stage.root), folder),
        stage=stage,
        figures=facts.figures(stage),
        diagnosis=facts.diagnosis_facts(stage.diagnosis),
        charts=charts.charts(columns),
        other_charts=others,
        columns_left_out=left_out,
    )


def _hero_links(groups: Sequence[PageSection], anchor: str) -> list[Link]:
    """Links to the section that the headline is about, and to that section's own page."""
    for group in groups:
        if group.anchor == anchor:
            pages = [link for link in group.links if link[0].endswith(" page")]
            return [*pages, (f"more on {group.name}", f"#{quote(anchor)}")]
    return []


def _stage_files(root: Path) -> list[Path]:
    paths = StagePaths(root)
    files = [paths.diagnosis_html, paths.diagnosis, paths.outcome, paths.accepted, paths.metrics]
    newest = AttemptPaths(paths.latest)
    return [*files, newest.evidence, newest.profiles]


def _step_files(root: Path) -> list[Path]:
    """The files of a check or a server; the section shows those that exist."""
    server = ServerPaths(root)
    pages = [ComparisonPaths(root).page, AgentsPaths(root).page]
    files = [*pages, server.verdict, server.endpoint]
    return [*files, server.log, server.daemon_log, PreflightPaths(root).nodes]


def _links(files: Iterable[Path], folder: Path) -> list[Link]:
    """A link to each existing file, by its name; pages by their kind (`report page`)."""
    return [
        (f"{path.stem} page" if path.suffix == ".html" else path.name, _href(path, folder))
        for path in files
        if path.exists()
    ]


def _href(path: Path, folder: Path) -> str:
    """A relative URL, so that `folder` and the run's folder can move together."""
    relative = os.path.relpath(path, folder)
    # `surrogateescape` keeps names that are not UTF-8; a leading `./` keeps `a:b` from being a
    # scheme.
    return quote(os.fsencode(os.path.join(".", relative)))


def _evidence(root: Path, folder: Path) -> Callable[[str, Path | None], Link]:
    """A function from an evidence text to its label, and its URL if it names a file of this run.

    The text may name a file relative to the run's folder, `base` or its evidence, followed by a
    line number or an explanation.
    """
    home = root.resolve()

    def link(item: str, base: Path | None = None) -> Link:
        name = re.match(r"(.*?)(:\d+)?(: .*)?$", item[:1000], re.DOTALL)
        if name is None or not name[1]:
            return item, ""
        homes = [home, base, AttemptPaths(base).evidence] if base else [home]
        places = [Path(name[1]), *(place / name[1] for place in homes)]
        try:
            found = next((place.resolve() for place in places if place.exists()), None)
            if found is None or not found.is_relative_to(home):
                return item, ""
        except (OSError, ValueError):
            return item, ""
        inside = found.relative_to(home)
        return f"{inside}{item[len(name[1]) :]}", _href(home / inside, folder.resolve())

    return link


def _slug(state: str) -> str:
    return state.lower().replace(" ", "-")


def _outcome_mark(attempt: AttemptView) -> str:
    return _MARKS.get(attempt.outcome.state, "blocked") if attempt.outcome else "skip"


def _chart_data(chart: Chart) -> list[dict[str, Any]]:
    """The data behind the curves; the script reads the coordinates from their paths."""
    return [{"steps": curve.steps, "values": curve.values} for curve in chart.curves]


def _content_hash(script: str) -> str:
    """The page's policy allows only this script, so that injected text cannot run."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
