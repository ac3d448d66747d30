"""A diagnosis verdict for the page and the terminal: ordered, merged, bounded. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from shakedown.core.ranges import named, ranges
from shakedown.core.verdict import Verdict
from shakedown.diagnosis import wait_graph
from shakedown.diagnosis.advice import spans, steps
from shakedown.diagnosis.summary import SECTIONS
from shakedown.report import stack_tree
from shakedown.report.text import plural
from shakedown.stacks.frames import Frame, is_user

_FRAME = re.compile(r"(.*) \((.*?)(?::\d+)?\)")
MAX_EVIDENCE = 60
MAX_TEXT = 2000  # characters of one sentence or quote


@dataclass(frozen=True)
class ShownClass:
    """A class with its letter. `ranks`: as text; `where`: the innermost user frame.

    `culprit`: the number of culprits in it.
    """

    label: str
    count: int
    ranks: str
    waiting_in: str
    where: str
    culprit: int
    path: tuple[str, ...]


@dataclass(frozen=True)
class Quote:
    """`place`: file and line; `text`: its content."""

    place: str
    text: str


class View:
    """The view that both outputs share. Keys that an older verdict lacks count as empty."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.diagnosis: Mapping[str, Any] = verdict.extra["diagnosis"]
        self.culprit_ranks = frozenset(self.diagnosis["culprits"]["ranks"])
        self.rows = sorted(
            self.diagnosis["classes"],
            key=lambda row: not self.culprit_ranks & set(row["ranks"]),
        )
        self.timeline: Sequence[Mapping[str, Any]] = verdict.extra.get("timeline", [])
        self.hosts: Mapping[str, str] = verdict.extra.get("hosts", {})

    @property
    def sentence(self) -> str:
        return cut(self.verdict.summary)

    @property
    def summary(self) -> Mapping[str, Sequence[Mapping[str, str]]]:
        """What was seen, by section; empty in a verdict of an earlier release."""
        found: Mapping[str, Sequence[Mapping[str, str]]] = self.diagnosis.get("summary", {})
        return found

    @property
    def seen(self) -> list[tuple[str, Sequence[Mapping[str, str]]]]:
        """The sections of `summary` that have rows, under their headings."""
        return [(SECTIONS[title], rows) for title, rows in self.summary.items() if rows]

    @property
    def calm(self) -> bool:
        """Whether nothing is wrong, so that absent inputs are not missing."""
        return "healthy" in (self.diagnosis["state"], self.diagnosis["cause"])

    @property
    def moment(self) -> bool:
        """Whether there is more to show of the ranks than their numbers."""
        return bool(self.roots or self.graph.nodes or self.timeline)

    @property
    def wants_recorder(self) -> bool:
        """Whether the ranks' last calls, which were not given, would tell more."""
        return not self.calm and self.diagnosis["state"] in ("hung", "unknown")

    @cached_property
    def labels(self) -> list[str]:
        return [letters(n) for n in range(len(self.rows))]

    @cached_property
    def classes(self) -> list[ShownClass]:
        """Classes of culprits first, then by size; at most `stack_tree.MAX_CLASSES`."""
        return [
            ShownClass(
                label,
                len(row["ranks"]),
                ranges(row["ranks"]),
                cut(str(row["waiting_in"]), 200),
                cut(user_frame(row["path"]), 200) or "no stack",
                len(self.culprit_ranks & set(row["ranks"])),
                tuple(stack_tree.bounded_path(row["path"])),
            )
            for label, row in zip(self.labels, self.rows[: stack_tree.MAX_CLASSES], strict=False)
        ]

    @property
    def hidden_classes(self) -> int:
        return max(0, len(self.rows) - stack_tree.MAX_CLASSES)

    @cached_property
    def roots(self) -> list[stack_tree.TreeNode]:
        return stack_tree.merge_paths(self.rows, self.culprit_ranks)

    @cached_property
    def graph(self) -> wait_graph.Graph:
        culprits = self.diagnosis["culprits"]
        culprit = frozenset(
            chain((f"rank {r}" for r in culprits["ranks"]), culprits["roles"], culprits["nodes"])
        )
        numbers = {rank: n for n, row in enumerate(self.rows) for rank in row["ranks"]}
        return wait_graph.merge(self.diagnosis["wait_for"], numbers, culprit)

    @cached_property
    def culprits(self) -> list[tuple[str, str]]:
        """(who, where): ranks by class, then roles and nodes."""
        found = []
        rest = set(self.culprit_ranks)
        for label, row in zip(self.labels, self.rows, strict=True):
            mine = sorted(rest & set(row["ranks"]))
            if mine:
                rest -= set(mine)
                found.append((self._who(mine), self._where(label, row)))
        if rest:
            found.append((named(rest), "no stack, dump or log of it was found"))
        kinds = (("role", "roles"), ("node", "nodes"))
        for kind, key in kinds:
            names = self.diagnosis["culprits"][key]
            found += [(f"{kind} {cut(str(name), 200)}", "") for name in names[:32]]
        return found

    def _who(self, ranks: Sequence[int]) -> str:
        on = []
        for host, text in self.hosts.items():
            parts = spans(text)
            if any(a <= r <= b for r in ranks[:256] for a, b in parts):
                on.append(host)
        told = f" on {', '.join(on[:4])}" if on else ""
        return named(ranks) + told + (f" and {len(on) - 4} more hosts" if len(on) > 4 else "")

    def _where(self, label: str, row: Mapping[str, Any]) -> str:
        at = user_frame(row["path"]) or "no stack"
        waiting = str(row["waiting_in"])
        inside = f"{waiting}, " if waiting not in ("", "unknown") else ""
        return cut(f"{inside}{at} (class {label})", 400)

    @cached_property
    def why(self) -> list[str]:
        """The basis of the confidence."""
        formats: dict[str, int] = {}
        for kind in self.verdict.extra.get("sources", {}).values():
            formats[str(kind)] = formats.get(str(kind), 0) + 1
        read = ", ".join(f"{count} {kind}" for kind, count in sorted(formats.items()))
        seen = int(self.verdict.metrics.get("ranks_seen", 0))
        conflicts = len(self.diagnosis["conflicts"])
        found = (
            [f"ranks seen: {seen:,}, in {sum(formats.values()):,} inputs: {read}"] if read else []
        )
        if self.all_evidence:
            found.append(f"{plural(len(self.all_evidence), 'piece')} of evidence listed below")
        if conflicts:
            found.append(f"conflicting readings: {conflicts}, each lowers it by 0.1")
        else:
            other = " else" if self.culprits else ""
            found.append(f"no reading of the inputs names a culprit{other}")
        if self.diagnosis["needed"]:
            found.append('the items listed under "to be sure" would raise it')
        return found

    @cached_property
    def all_evidence(self) -> list[Quote]:
        """The evidence of all findings, each once; places without a text get their quote."""
        quotes = self.verdict.extra.get("quotes", {})
        found: dict[str, Quote] = {}
        for finding in self.verdict.findings:
            for text in finding.evidence:
                if text not in found:
                    place, _, told = str(text).partition(": ")
                    found[text] = Quote(cut(place, 300), cut(told or quotes.get(place, "")))
        return list(found.values())

    @property
    def evidence(self) -> list[Quote]:
        return self.all_evidence[:MAX_EVIDENCE]

    @cached_property
    def steps(self) -> list[tuple[str, str]]:
        return [(cut(text), cut(command)) for text, command in steps(self.verdict)][:12]

    @cached_property
    def skipped(self) -> list[Quote]:
        """The inputs that were not read."""
        rows = [f for f in self.verdict.findings if f.check == "read"]
        return [Quote(cut(f.subject, 300), cut(str(f.measured), 300)) for f in rows]

    @property
    def unread(self) -> str:
        """`1 input was not read, 2 notes`."""
        told = []
        if self.skipped:
            verb = "was" if len(self.skipped) == 1 else "were"
            told.append(f"{plural(len(self.skipped), 'input')} {verb} not read")
        if self.notes:
            told.append(plural(len(self.notes), "note"))
        return ", ".join(told)

    @cached_property
    def notes(self) -> list[str]:
        return [cut(str(f.measured)) for f in self.verdict.findings if f.check == "note"]


def has_frames(group: Mapping[str, Any]) -> bool:
    """Whether a call of this group in the timeline has its place in the code."""
    return any(call["where"] for row in group["rows"] for call in row["calls"])


def user_frame(path: Sequence[str]) -> str:
    """The innermost frame of the user's own code, else the innermost; empty without frames."""
    for text in reversed(path):
        found = _FRAME.fullmatch(text)
        if found and is_user(Frame(found[1], found[2])):
            return str(text)
    return str(path[-1]) if path else ""


def letters(number: int) -> str:
    """A, B, ... Z, AA, AB, ...: a class's name."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """At most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
