"""A config of another project: its values, where they are written, and which keys are known."""

import difflib
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from shakedown.config.load import Written
from shakedown.core.errors import did_you_mean
from shakedown.core.verdict import Finding

# OmegaConf's `${actor.path}`; with a colon it calls a resolver, as in `${oc.env:HOME}`.
_REFERENCE = re.compile(r"\$\{([A-Za-z0-9_.\[\]-]+)\}")
_MAX_HOPS = 20  # references that lead to references; also ends a circle
_MAX_KEYS = 10_000  # aliases can make a short file long without end
_MAX_CANDIDATES = 300  # among which a near key is looked for
_MAX_FINDINGS = 50  # of one kind: more say nothing new, and each costs a search for a near key
# As difflib counts: `rolout` is 0.92 near `rollout`, a section of the run's own, `econfig`, 0.74
# near `eval_gconfig`.
_SURE = 0.8


@dataclass(frozen=True)
class Schema:
    """The keys that a project knows, as scripts/foreign_keys.py has read them.

    `classes` maps a class to its keys, and each key to the classes that may stand below it; the
    class `*` stands for anything, and so does the key `*` of a class.
    """

    source: str
    kinds: Mapping[str, str]
    classes: Mapping[str, Mapping[str, Sequence[str]]]

    def below(self, classes: Sequence[str], key: str) -> Sequence[str] | None:
        """The classes that may stand below a key of `classes`; None when no class has the key."""
        rows = [row for name in classes if (row := self.classes.get(name)) is not None]
        if "*" in classes or any("*" in row and key not in row for row in rows):
            return ["*"]
        found = [row[key] for row in rows if key in row]
        return [name for names in found for name in names] if found else None

    def at(self, classes: Sequence[str], key: str) -> Sequence[str] | None:
        """The classes that may stand below a dotted key; None when it is unknown."""
        below: Sequence[str] | None = classes
        for part in key.split(".") if key else ():
            if below is not None and not part.isdigit():  # the number of a list's element
                below = self.below(below, part)
        return below

    def has(self, classes: Sequence[str], key: str) -> bool:
        """Whether a dotted key can stand below `classes`."""
        return self.at(classes, key) is not None

    def keys(self, classes: Sequence[str] | None) -> list[str]:
        return sorted({key for name in classes or () for key in self.classes.get(name, ())})


@cache
def read_schema(name: str) -> Schema:
    """The schema of a project, `areal` or `prime_rl`."""
    body = json.loads((Path(__file__).parent / f"{name}_keys.json").read_text(encoding="utf-8"))
    return Schema(body["source"], body["kinds"], body["classes"])


@dataclass(frozen=True)
class Document:
    """Values by dotted key; those of AReaL may refer to each other by `${key}`."""

    body: Mapping[str, Any]
    written: Written
    kind: str = ""
    begin: str = ""  # where the first file begins: the place of what stands nowhere
    null: str = ""  # a text that stands for null

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, references followed; `default` where it is absent or null."""
        found = self._follow(key, _MAX_HOPS)
        return default if found is None or self.is_null(found) else found

    def is_null(self, found: object) -> bool:
        """Whether a value is the text that stands for null."""
        return bool(self.null) and found == self.null

    def nulled(self, key: str) -> bool:
        """Whether that text stands there: another thing than an absent key, which has a default."""
        return self.is_null(self._follow(key, _MAX_HOPS))

    def has(self, key: str) -> bool:
        """Whether something other than null stands there."""
        return self.get(key) is not None

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number; None when something else stands there, or a reference that leads nowhere.

        Text that is a number counts, as it does for OmegaConf: PyYAML reads `2e-5` as text.
        """
        found = self.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float | str):
            return None
        try:
            return float(found)
        except (ValueError, OverflowError):
            return None

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A whole number, or None."""
        found = self.number(key, default)
        return int(found) if found is not None and found.is_integer() else None

    def text(self, key: str, default: str = "") -> str:
        """A text, or an empty one when something else stands there."""
        found = self.get(key, default)
        return found if isinstance(found, str) else ""

    def at(self, key: str) -> str:
        """`FILE:LINE:COLUMN` of a key, or of the nearest section around it."""
        return self.written.at(key) or self.begin

    def _follow(self, key: str, hops: int) -> Any:
        value: Any = self.body
        parts = key.split(".")
        for number, part in enumerate(parts):
            value = self._child(value, part)
            if isinstance(value, str) and (match := _REFERENCE.fullmatch(value)):
                if hops <= 0:
                    return None
                return self._follow(".".join([match[1], *parts[number + 1 :]]), hops - 1)
        return value

    @staticmethod
    def _child(value: Any, part: str) -> Any:
        if isinstance(value, Mapping):
            return value.get(part)
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            return value[int(part)]
        return None

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Dotted key and value of all that is no mapping and no list."""
        for key, value, _ in _walk(self.body, ()):
            if not isinstance(value, Mapping | list):
                yield key, value


Classes = Sequence[str]


def _walk(
    body: Mapping[str, Any], root: Classes, schema: Schema | None = None
) -> Iterator[tuple[str, Any, Classes | None]]:
    """Each key with its value and, by `schema`, the classes below it; None for an unknown key."""
    waiting: deque[tuple[str, Any, Classes]] = deque([("", body, root)])
    left = _MAX_KEYS
    while waiting:
        prefix, value, classes = waiting.popleft()
        is_list = isinstance(value, list)
        for name, child in islice(enumerate(value) if is_list else value.items(), left):
            key = f"{prefix}{name}"
            below = classes if is_list or schema is None else schema.below(classes, str(name))
            yield key, child, below
            left -= 1
            if below is not None and isinstance(child, Mapping | list):
                waiting.append((f"{key}.", child, below))


def told(
    status: Literal["fail", "warn"],
    check: str,
    key: str,
    measured: object,
    expected: str,
    *,
    remedy: str = "",
) -> Finding:
    """A finding about one key of the user's."""
    if isinstance(measured, Mapping | list):
        measured = f"a {'list' if isinstance(measured, list) else 'section'}"  # it may be huge
    return Finding(
        check=check,
        status=status,
        scope="config",
        subject=key,
        measured=measured,
        expected=expected,
        blame="user",
        remedy=remedy,
    )


def unknown_keys(
    document: Document, schema: Schema, *, renamed: Mapping[str, str], own: bool
) -> list[Finding]:
    """Keys that the project does not know, as far as `schema` goes: never more than a warning.

    Args:
        renamed: the last part of a key that an earlier version had -> what to write now.
        own: a run may have keys of its own at the top: only those near a known one are told.
    """
    findings = []
    root = [schema.kinds[document.kind]]
    found = (key for key, _, below in _walk(document.body, root, schema) if below is None)
    for key in islice(found, _MAX_FINDINGS):
        section, _, name = key.rpartition(".")
        there = document.get(section) if section else document.body
        # A key that stands there already is not what was meant.
        near = [known for known in schema.keys(schema.at(root, section)) if known not in there]
        advice = renamed.get(name, "")
        sure = advice or difflib.get_close_matches(name[:80], near, 1, _SURE)
        if sure or not own or section:
            advice = advice or did_you_mean(name[:80], near).strip(" ()")
            expected = f"a key of {schema.source}"
            findings.append(told("warn", "unknown_key", key, name, expected, remedy=advice))
    return findings


def dangling(document: Document, schema: Schema) -> list[Finding]:
    """References to keys that neither the file nor the project has."""
    root, leaves = [schema.kinds[document.kind]], list(document.leaves())
    written = [(key, value) for key, value in leaves if isinstance(value, str)]
    wanted = ((key, value, name) for key, value in written for name in _REFERENCE.findall(value))
    lost = (row for row in wanted if not document.has(row[2]) and not schema.has(root, row[2]))
    candidates = [*document.body, *(key for key, _ in leaves[:_MAX_CANDIDATES])]
    findings = []
    for key, value, name in islice(lost, _MAX_FINDINGS):
        # A section of the run's own may have defaults that stand in no file.
        known = schema.has(root, name.partition(".")[0])
        guess = did_you_mean(name[:80], map(str, candidates)).strip(" ()")
        if known or guess:
            expected = "a reference to a key that exists"
            status: Literal["fail", "warn"] = "fail" if known else "warn"
            findings.append(told(status, "reference", key, value, expected, remedy=guess))
    return findings
