"""A stage's own folder given as input: its newest attempt is judged, and the verdict says so."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from shakedown.core.paths import AttemptPaths, StagePaths
from shakedown.core.verdict import Finding, Verdict


def newest_of(path: Path) -> Path | None:
    """The newest of a stage's attempts; None for any other path, or where there is one alone."""
    stage = StagePaths(path)
    try:
        numbers = stage.attempt_numbers()
    except OSError:  # reading the files of the folder will say why
        return None
    newest = stage.attempt(numbers[-1]).root if len(numbers) > 1 else None
    # Only attempts of ours have heartbeats: a stranger's folder with numbered ones is read as it
    # is.
    return newest if newest and AttemptPaths(newest).heartbeats.is_dir() else None


def with_newest_told(verdict: Verdict, paths: Iterable[Path]) -> Verdict:
    """The verdict with a note for each of `paths` of which one attempt alone was judged."""
    found = [(path, newest) for path in paths if (newest := newest_of(path)) is not None]
    told = [f"{path}: attempt {newest.name}, the newest, is judged" for path, newest in found]
    notes = (Finding("note", "skip", "config", measured=text) for text in told)
    return replace(
        verdict,
        summary="; ".join([verdict.summary, *told]),
        findings=[*verdict.findings, *notes],
    )
