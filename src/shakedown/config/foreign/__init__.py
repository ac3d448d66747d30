"""Configs of other projects, judged by how their sources use each key.

A project is a module with `kind_of(body)`, which recognises the project's files by their keys, a
function that judges a `Document`, and a row in `PROJECTS`.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shakedown.config.foreign import areal, prime_rl
from shakedown.config.foreign.document import Document, count_unknown, told
from shakedown.config.foreign.source import Layout, UnreadableError, read_schema
from shakedown.config.load import KeyLocations, merge, read_yaml
from shakedown.config.toml_places import is_deep
from shakedown.core.errors import ConfigError
from shakedown.core.verdict import Finding, Stopwatch, Verdict, counted, status_of

_MOST_DOTS = 50  # of a key in TOML


@dataclass(frozen=True)
class Project:
    """Another project whose configs are read.

    `null`: a text that stands for null, which TOML does not have. `overlap`: several kinds share
    most keys, so that of a known version the kind that knows most of a file's keys is taken.
    """

    layout: Layout
    suffixes: Sequence[str]
    kind_of: Callable[[Mapping[str, Any]], str]
    lint: Callable[[Document], list[Finding]]
    null: str = ""
    overlap: bool = False


PROJECTS = (
    Project(areal.LAYOUT, (".yaml", ".yml"), areal.kind_of, areal.lint_areal),
    Project(prime_rl.LAYOUT, (".toml",), prime_rl.kind_of, prime_rl.lint_prime_rl, "None", True),
)


def judge_foreign(paths: Sequence[Path], source: Path | None = None) -> Verdict | None:
    """The verdict on files of another project, later ones over earlier; None for other files.

    Args:
        source: a checkout or an installation of the project, whose names of keys are read.

    Raises:
        ConfigError: a file is missing, cannot be read, or is TOML of an unknown project.
        UsageError: `source` is not the project's.
    """
    clock = Stopwatch()
    body: dict[str, Any] = {}
    for path in paths:
        body = merge(
            body, read_toml(path) if path.suffix == ".toml" else read_yaml(path, shared=True)
        )
    suffixes = {path.suffix for path in paths}
    for project in PROJECTS:
        kind = project.kind_of(body) if suffixes <= set(project.suffixes) else ""
        if kind:
            begin = f"{paths[0]}:1:1"
            document = Document(body, KeyLocations(paths), kind, begin, project.null)
            document, findings = _with_schema(project, document, paths, source)
            findings = [*project.lint(document), *findings]
            findings = [replace(f, evidence=[document.at(f.subject)]) for f in findings]
            return _verdict(f"{project.layout.name} ({document.kind})", paths, findings, clock)
    if ".toml" in suffixes:
        where = " + ".join(map(str, paths))
        raise ConfigError(f"{where}: TOML of an unknown project; expected a config of prime-rl")
    return None


def _with_schema(
    project: Project, document: Document, paths: Sequence[Path], source: Path | None
) -> tuple[Document, list[Finding]]:
    """The document with the names of its version, or a warning that they are not known."""
    layout = project.layout
    if document.kind not in layout.kinds:
        return document, []
    try:
        schema = read_schema(layout, source, paths)
        kinds = [document.kind, *(schema.kinds if project.overlap else ())]
        kind = min(
            set(kinds) & set(schema.kinds),
            key=lambda kind: (count_unknown(document.body, schema, kind), kinds.index(kind)),
            default="",
        )
        if kind:
            return replace(document, schema=schema, kind=kind), []
        reason = f"{schema.source} has no config of this kind"
    except UnreadableError as error:
        reason = str(error)
    expected = f"the names of {layout.name}'s keys, to compare the file's with"
    remedy = f"give a checkout of your version: --source PATH, or install {layout.name}"
    return document, [told("warn", "source", "keys", reason, expected, remedy=remedy)]


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of one file.

    Raises:
        ConfigError: missing, or not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if is_deep(text, _MOST_DOTS):
            raise ConfigError(f"{path}: a key has more than {_MOST_DOTS} dots")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        place = re.search(r" \(at line (\d+), column (\d+)\)", str(error))
        where = f"{path}:{place[1]}:{place[2]}" if place else str(path)
        raise ConfigError(f"{where} is not TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read: nested too deeply") from error


def _verdict(
    what: str, paths: Sequence[Path], findings: Sequence[Finding], clock: Stopwatch
) -> Verdict:
    where = f"{' + '.join(map(str, paths))}: {what}"
    return Verdict(
        stage="lint",
        status=status_of(findings),
        summary=f"{where}: {counted(findings)}" if findings else f"{where} is sound",
        findings=findings,
        started=clock.started,
        seconds=clock.seconds,
    )
