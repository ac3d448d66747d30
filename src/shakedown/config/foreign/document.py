"""A config of another project: its values, where they are written, and which keys are known."""

import difflib
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from shakedown.config.foreign.source import Schema
from shakedown.config.load import KeyLocations
from shakedown.core.errors import did_you_mean
from shakedown.core.verdict import Finding, advice, fault

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
class Document:
    """Values by dotted key; those of AReaL may refer to each other by `${key}`."""

    body: Mapping[str, Any]
    written: KeyLocations
    kind: str = ""
    begin: str = ""  # where the first file begins: the location of absent keys
    null: str = ""  # a text that stands for null
    schema: Schema | None = None  # of the version that the config is for; None: it is not known

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, references followed; where it is absent or null its default.

        That is what the version's source shows, `default` where it shows none or is not known. A
        key that the version does not have has no default.
        """
        found = self._follow(key, _MAX_HOPS)
        if found is not None and not self.is_null(found):
            return found
        if default is None or self.schema is None:
            return default
        return self.schema.default(self.kind, key, default)

    def knows(self, key: str) -> bool:
        """Whether the version has a dotted key; True where the version is not known."""
        return self.schema is None or self.schema.at(self.kind, key) is not None

    def is_null(self, found: object) -> bool:
        """Whether a value is the text that stands for null."""
        return bool(self.null) and found == self.null

    def nulled(self, key: str) -> bool:
        """Whether the value is that text, unlike an absent key, which has a default."""
        return self.is_null(self._follow(key, _MAX_HOPS))

    def has(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self.get(key) is not None

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number; None for another value, or a reference that leads nowhere.

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
        """A text, or an empty one for another value."""
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
        """Dotted key and value of everything but mappings and lists."""
        for key, value, *_ in _walk(self.body, ()):
            if not isinstance(value, Mapping | list):
                yield key, value


Classes = Sequence[str]


def _walk(
    body: Mapping[str, Any], root: Classes, schema: Schema | None = None
) -> Iterator[tuple[str, Any, Classes, bool]]:
    """Each key with its value, the classes that it stands in, and whether one of them has it."""
    waiting: deque[tuple[str, Any, Classes]] = deque([("", body, root)])
    left = _MAX_KEYS
    while waiting:
        prefix, value, classes = waiting.popleft()
        is_list = isinstance(value, list)
        for name, child in islice(enumerate(value) if is_list else value.items(), left):
            key = f"{prefix}{name}"
            below = classes if is_list or schema is None else schema.below(classes, str(name))
            yield key, child, classes, below is not None
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
    return (fault if status == "fail" else advice)(check, key, measured, expected, remedy)


def count_unknown(body: Mapping[str, Any], schema: Schema, kind: str) -> int:
    """The number of keys that a kind of file does not have."""
    return sum(not known for *_, known in _walk(body, [schema.kinds[kind]], schema))


def lint_names(document: Document, renamed: Mapping[str, str], *, own: bool) -> list[Finding]:
    """Keys and choices that the version of the project does not know.

    Args:
        renamed: the last part of a key that an earlier version had -> what to write now.
        own: a run may have keys of its own at the top: only those near a known one are reported.
    """
    schema = document.schema
    if schema is None:
        return []
    unknown: list[Finding] = []
    wrong: list[Finding] = []
    for key, value, classes, known in _walk(document.body, [schema.kinds[document.kind]], schema):
        if len(unknown) + len(wrong) >= _MAX_FINDINGS:
            break
        if known:
            wrong += _choice(schema, classes, key, value)
        else:
            unknown += _unknown(document, schema, classes, key, renamed, own=own)
    return unknown + wrong


def _unknown(
    document: Document,
    schema: Schema,
    classes: Classes,
    key: str,
    renamed: Mapping[str, str],
    *,
    own: bool,
) -> list[Finding]:
    section, _, name = key.rpartition(".")
    there = document.get(section) if section else document.body
    # A key that stands there already is not what was meant.
    near = [known for known in schema.names(classes) if known not in (there or ())]
    advice = renamed.get(name, "")
    sure = advice or difflib.get_close_matches(name[:80], near, 1, _SURE)
    mine = own and not section
    if mine and not sure:
        return []
    advice = advice or did_you_mean(name[:80], near).strip(" ()")
    # Keys that a run's own class adds, or that a class ignores, may be intended.
    doubtful = mine or not schema.lenient.isdisjoint(classes)
    status: Literal["fail", "warn"] = "warn" if doubtful else "fail"
    return [told(status, "unknown_key", key, name, f"a key of {schema.source}", remedy=advice)]


def _choice(schema: Schema, classes: Classes, key: str, value: object) -> Iterator[Finding]:
    """A finding for a text that the version's source does not allow."""
    found = schema.find(classes, key.rpartition(".")[2])
    if not isinstance(value, str) or "${" in value or any(each.choices is None for each in found):
        return
    valid = sorted({text for each in found for text in each.choices or ()} - {"None"})
    if found and value not in (*valid, "None"):
        expected = f"{' or '.join(valid)}, as {schema.source} has it"
        remedy = did_you_mean(value[:80], valid).strip(" ()")
        yield told("fail", "choice", key, value, expected, remedy=remedy)


def dangling(document: Document) -> list[Finding]:
    """References to keys that neither the file nor the version of the project has."""
    if document.schema is None:
        return []
    leaves = list(document.leaves())
    written = [(key, value) for key, value in leaves if isinstance(value, str)]
    wanted = ((key, value, name) for key, value in written for name in _REFERENCE.findall(value))
    lost = (row for row in wanted if not document.has(row[2]) and not document.knows(row[2]))
    candidates = [*document.body, *(key for key, _ in leaves[:_MAX_CANDIDATES])]
    findings = []
    for key, value, name in islice(lost, _MAX_FINDINGS):
        # A section of the run's own may have defaults that stand in no file.
        known = document.knows(name.partition(".")[0])
        guess = did_you_mean(name[:80], map(str, candidates)).strip(" ()")
        if known or guess:
            expected = "a reference to a key that exists"
            status: Literal["fail", "warn"] = "fail" if known else "warn"
            findings.append(told(status, "reference", key, value, expected, remedy=guess))
    return findings
