"""episodes.html: conversations of an agent's episodes, failed ones first, and some good ones.

One file without scripts or network access; everything in it is escaped.
"""

import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from shakedown import __version__
from shakedown.agents.episode_lines import read_episodes
from shakedown.core.files import write_text
from shakedown.core.folders import storage_errors
from shakedown.core.paths import AgentsPaths, RunPaths
from shakedown.core.verdict import Verdict
from shakedown.report import text
from shakedown.report.episodes_view import EpisodeView, episode_view
from shakedown.report.facts import check_table
from shakedown.report.text import page_environment

MOST_FAILED, MOST_OF_CAUSE, MOST_GOOD = 200, 50, 40  # conversations on the page
_ROOM = 6_000_000  # characters of all conversations; browsers are slow with more

Line = Mapping[str, Any]


@dataclass
class ChosenEpisodes:
    """The episodes of a page, and the number of each cause (empty: good) in the file.

    `damage`: the note on lines of the file that are not episodes.
    """

    failed: list[EpisodeView] = field(default_factory=list)
    good: list[EpisodeView] = field(default_factory=list)
    damage: str = ""
    causes: Counter[str] = field(default_factory=Counter)
    on_purpose: int = 0

    @property
    def total(self) -> int:
        return self.causes.total() + self.on_purpose


def write_page(paths: AgentsPaths, verdict: Verdict) -> None:
    """Write the page of a folder's episodes.

    Raises:
        StorageError: the episodes cannot be read, or the page not written.
    """
    with storage_errors("read", paths.episodes):
        lines = read_episodes(paths.episodes)
        chosen = choose(lines.numbered())
    html = render(replace(chosen, damage=lines.damage), verdict, _run_page(paths))
    write_text(paths.page, html.encode("utf-8", "replace").decode("utf-8"))


def choose(lines: Iterable[tuple[int, Line]]) -> ChosenEpisodes:
    """The first episodes of each cause, and a reproducible sample of good ones.

    Args:
        lines: the lines with their numbers, read one by one: memory is only needed for what is
            shown.
    """
    found, draw = ChosenEpisodes(), random.Random(0)
    good: list[EpisodeView] = []
    for number, line in lines:
        cause = text.shorten(line.get("cause"), 60)
        if line.get("on_purpose"):
            found.on_purpose += 1
            continue
        found.causes[cause] += 1
        if not cause:
            _sample(good, line, number, found.causes[""], draw)
        elif found.causes[cause] <= MOST_OF_CAUSE and len(found.failed) < MOST_FAILED:
            found.failed.append(episode_view(line, number))
    found.failed.sort(key=lambda episode: episode.index)  # `next` runs the first one again
    found.good = sorted(good, key=lambda episode: episode.line)
    room = _ROOM
    for episodes in (found.failed, found.good):
        room = _keep(episodes, room)
    return found


def render(chosen: ChosenEpisodes, verdict: Verdict, run_page: str = "") -> str:
    """The page as text.

    Args:
        run_page: the URL of the whole run's page; empty: there is none.
    """
    environment = page_environment()
    for function in (text.duration, text.number, text.plural, text.shorten):
        environment.filters[function.__name__] = function
    return environment.get_template("episodes.html").render(
        chosen=chosen,
        verdict=verdict,
        run_page=run_page,
        table=check_table(verdict),
        failures=[(cause, count) for cause, count in chosen.causes.most_common() if cause],
        shakedown_version=__version__,
    )


def _sample(
    kept: list[EpisodeView], line: Line, number: int, seen: int, draw: random.Random
) -> None:
    """Reservoir sampling: each of the good episodes has the same chance."""
    if len(kept) < MOST_GOOD:
        kept.append(episode_view(line, number))
    elif (place := draw.randrange(seen)) < MOST_GOOD:
        kept[place] = episode_view(line, number)


def _keep(episodes: list[EpisodeView], room: int) -> int:
    """Drop what does not fit; returns the remaining room."""
    for place, episode in enumerate(episodes):
        room -= episode.size
        if room < 0:
            del episodes[place:]
            return 0
    return room


def _run_page(paths: AgentsPaths) -> str:
    """The URL of the run's page, only for the folder of a run."""
    run = RunPaths(paths.root.absolute().parent)
    if run.agents.root != paths.root.absolute() or not run.config.is_file():
        return ""
    return quote(os.path.relpath(run.report, run.agents.root))
