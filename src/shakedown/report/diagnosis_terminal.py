"""A diagnosis for a person at a terminal: plain lines, bounded in width and number. Pure."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from shakedown.core.ranges import ranges
from shakedown.core.verdict import Verdict
from shakedown.diagnosis.records import clean
from shakedown.report import stack_tree
from shakedown.report.diagnosis_view import View

WIDTH = 120  # where no terminal says
SENTENCE_LINES = 4
FULL_WIDTH = 4000
# Lines of each section; with the sentence and the headings at most 60.
LIMITS = {
    "culprits": 3,
    "classes": 6,
    "call paths": 12,
    "who waits for whom": 4,
    "collectives around the break": 7,
    "evidence": 4,
    "against it": 2,
    "next": 6,
}
_RED, _BOLD, _PLAIN = "\x1b[31;1m", "\x1b[1m", "\x1b[0m"
MAX_LINES = 58  # with the names of the two files written: 60
# Who gets lines that others leave over.
_SPARE = ("call paths", "collectives around the break", "against it", "evidence", "classes")
_COMMAND = "    $ "
_CULPRIT = "* "  # stands before whatever holds a culprit


def render(
    verdict: Verdict, width: int = WIDTH, *, full: bool = False, colour: bool = False
) -> str:
    """The sentence, then sections. `full`: nothing is left out or cut. `*` marks culprits."""
    view = View(verdict)
    width = max(width, 40)
    head = f"{verdict.stage}: {verdict.status}: {clean(view.sentence, FULL_WIDTH)}"
    lines = textwrap.wrap(
        head, width, max_lines=None if full else SENTENCE_LINES, placeholder=" ..."
    )
    diagnosis = view.diagnosis
    pattern = f", pattern {diagnosis['pattern']}" if diagnosis["pattern"] else ""
    cause = f"{diagnosis['state']}: {diagnosis['cause']}{pattern}"
    lines.append(clean(f"  {cause}, confidence {diagnosis['confidence']:.2f}"))
    limit = FULL_WIDTH if full else width
    sections = {title: [_fit(row, limit) for row in rows] for title, rows in _sections(view)}
    shares = _shares({t: len(r) for t, r in sections.items()}, MAX_LINES - len(lines) - 1)
    for title, rows in sections.items():
        told = rows if full else _bounded(rows, shares[title])
        if told:
            lines += [_paint(title, _BOLD, colour), *(_marked(row, colour) for row in told)]
    lines.append(clean(_tail(view), limit))
    return "\n".join(lines)


def _fit(row: str, limit: int) -> str:
    """Cut to the width; a command stays whole, to be copied."""
    return clean(row, FULL_WIDTH if row.startswith(_COMMAND) else limit)


def _shares(wanted: Mapping[str, int], lines: int) -> dict[str, int]:
    """Lines of each section: its own limit, and what others leave over in the order below."""
    spare = lines - sum(1 + min(n, LIMITS[title]) for title, n in wanted.items() if n)
    shares = {title: LIMITS[title] for title in wanted}
    for title in _SPARE:
        more = max(0, min(wanted[title] - shares[title], spare))
        shares[title] += more
        spare -= more
    return shares


def _bounded(rows: list[str], limit: int) -> list[str]:
    if len(rows) <= limit:
        return rows
    return [*rows[: limit - 1], f"  ... {len(rows) - limit + 1} more lines: --full"]


def _marked(row: str, colour: bool) -> str:
    return _paint(row, _RED, colour and row.lstrip().startswith(_CULPRIT))


def _paint(text: str, code: str, colour: bool) -> str:
    return f"{code}{text}{_PLAIN}" if colour else text


def _sections(view: View) -> Iterator[tuple[str, list[str]]]:
    yield (
        "culprits",
        [f"  {_CULPRIT}{who}{': ' + where if where else ''}" for who, where in view.culprits],
    )
    yield "classes", list(_classes(view))
    yield (
        "call paths",
        [line for depth, node in stack_tree.walk(view.roots) for line in _node(depth, node)],
    )
    yield "who waits for whom", list(_waits(view))
    yield (
        "collectives around the break",
        [line for group in view.timeline for line in _group(group)],
    )
    yield "evidence", [f"  {q.place}{': ' + q.text if q.text else ''}" for q in view.all_evidence]
    yield "against it", [f"  {text}" for text in [*view.diagnosis["conflicts"], *view.notes]]
    yield "next", list(_steps(view))


def _classes(view: View) -> Iterator[str]:
    widest = max((len(row.ranks) for row in view.classes), default=0)
    for row in view.classes:
        mark = _CULPRIT if row.culprit else "  "
        held = f" ({row.culprit} culprits)" if 0 < row.culprit < row.count else ""
        count = f"{row.count:>6,}"
        ranks = f"{row.ranks:<{min(widest, 28)}}"
        yield f"  {mark}{row.label:<2} {count}  {ranks}  {row.waiting_in}{held}, {row.where}"
    if view.hidden_classes:
        yield f"    and {view.hidden_classes} further classes, in diagnosis.json"


def _node(depth: int, node: stack_tree.TreeNode) -> Iterator[str]:
    indent = "  " * (depth + 1)
    mark = _CULPRIT if node.culprit else "  "
    waits = [text for text in node.waiting_in if text not in ("", "unknown")]
    ends = f" waits in {', '.join(waits)}" if waits else ""
    yield f"{indent}{mark}{len(node.ranks):,} of {ranges(node.ranks, 4)}:{ends}"
    shown = node.frames if len(node.frames) <= 3 else (node.frames[0], "...", node.frames[-1])
    if node.culprit:
        shown = node.frames
    yield from (f"{indent}    {frame}" for frame in shown)


def _waits(view: View) -> Iterator[str]:
    graph = view.graph
    for edge in graph.edges:
        waiter, awaited = graph.nodes[edge.waiter], graph.nodes[edge.awaited]
        circle = " (cycle)" if edge.cyclic else ""
        yield f"  {waiter.label} -> {awaited.label}{circle}: {edge.why[0]}"


def _group(group: Mapping[str, Any]) -> Iterator[str]:
    silent = f"; no record of {group['silent']}" if group["silent"] else ""
    yield f"  {group['group']}, ranks {group['members']}{silent}"
    for row in group["rows"]:
        mark = "> " if row["seq"] == group["break"] else "  "
        for call in row["calls"]:
            told = " ".join(filter(None, (call["op"], call["sizes"], call["dtypes"])))
            where = f" at {call['where']}" if call["where"] else ""
            yield f"  {mark}{row['seq']:<6} {call['state']:<11} {call['ranks']}: {told}{where}"
        if row["missing"]:
            yield f"  {mark}{row['seq']:<6} not entered {row['missing']}"


def _steps(view: View) -> Iterator[str]:
    for text, command in view.steps:
        yield f"  {text}"
        if command:
            yield f"{_COMMAND}{command}"


def _tail(view: View) -> str:
    read = len(view.verdict.extra.get("sources", {}))
    return f"  {read} inputs read, {len(view.skipped)} not, {view.verdict.seconds:.1f} s"
