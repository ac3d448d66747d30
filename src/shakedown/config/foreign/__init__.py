"""Configs of other projects, judged by what their sources make of each key.

A project is a module with `kind_of(body)`, which says by its keys whether a file is the project's,
a function that judges a `Document`, and a row in `PROJECTS`.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shakedown.config.foreign.areal import kind_of as kind_of_areal
from shakedown.config.foreign.areal import lint_areal
from shakedown.config.foreign.document import Document
from shakedown.config.foreign.prime_rl import kind_of as kind_of_prime_rl
from shakedown.config.foreign.prime_rl import lint_prime_rl
from shakedown.config.load import Written, merge, read_yaml
from shakedown.config.toml_places import is_deep
from shakedown.core.errors import ConfigError
from shakedown.core.verdict import Finding, Stopwatch, Verdict, counted, status_of

_MOST_DOTS = 50  # of a key in TOML


@dataclass(frozen=True)
class Project:
    """Another project whose configs are read.

    `null`: a text that stands for null, which TOML does not have.
    """

    name: str
    suffixes: Sequence[str]
    kind_of: Callable[[Mapping[str, Any]], str]
    lint: Callable[[Document], list[Finding]]
    null: str = ""


PROJECTS = (
    Project("AReaL", (".yaml", ".yml"), kind_of_areal, lint_areal),
    Project("prime-rl", (".toml",), kind_of_prime_rl, lint_prime_rl, null="None"),
)


def judge_foreign(paths: Sequence[Path]) -> Verdict | None:
    """The verdict on files of one other project, later ones over earlier; None when they are none.

    Raises:
        ConfigError: a file is missing, cannot be read, or is TOML of no known project.
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
            written = Written(paths)
            document = Document(body, written, kind, f"{paths[0]}:1:1", project.null)
            findings = [
                replace(finding, evidence=[document.at(finding.subject)])
                for finding in project.lint(document)
            ]
            return _verdict(f"{project.name} ({kind})", paths, findings, clock)
    if ".toml" in suffixes:
        where = " + ".join(map(str, paths))
        raise ConfigError(f"{where}: TOML of no known project; expected a config of prime-rl")
    return None


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
        raise ConfigError(f"{path} is not TOML for us: nested too deeply") from error


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
