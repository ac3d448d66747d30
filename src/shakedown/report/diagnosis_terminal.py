"""A diagnosis as terminal text: plain lines, bounded in width and number. Pure."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from shakedown.core.ranges import ranges
from shakedown.core.verdict import Verdict
from shakedown.diagnosis.records import clean, shorten
from shakedown.diagnosis.summary import MAX_LINES as MAX_SUMMARY
from shakedown.diagnosis.summary import shown
from shakedown.report import stack_tree
from shakedown.report.diagnosis_view import View

WIDTH = 120  # if no terminal tells its width
SENTENCE_LINES = 4
FULL_WIDTH = 4000
# Lines of each section, in order; sections with 0 appear if others leave room, or with --full.
LIMITS = {
    "culprits": 3,
    "other readings": 2,
    "next": 3,
    "evidence": 3,
    "classes": 3,
    "who waits for whom": 1,
    "call paths": 0,
    "collectives around the break": 0,
    "against it": 0,
}
_RED, _BOLD, _PLAIN = "\x1b[31;1m", "\x1b[1m", "\x1b[0m"
MAX_BRIEF = 8  # rows of each section of the Markdown
MAX_LINES = 23  # with the names of the two files written: 25
# Sections that get lines left over by others.
_SPARE = ("against it", "collectives around the break", "classes", "evidence", "call paths")
_LEAST = 3  # leftover lines needed for a section without its own lines
_COMMAND = "    $ "
_CULPRIT = "* "  # precedes everything that contains a culprit


def render(
    verdict: Verdict, width: int = WIDTH, *, full: bool = False, colour: bool = False
) -> str:
    """The sentence, then sections. `full`: nothing is omitted or cut. `*` marks culprits."""
    view = View(verdict)
    width = max(width, 40)
    head = f"{verdict.stage}: {verdict.status}: {clean(view.sentence, FULL_WIDTH)}"
    lines = textwrap.wrap(
        head, width, max_lines=None if full else SENTENCE_LINES, placeholder=" ..."
    )
    diagnosis = view.diagnosis
    pattern = f", pattern {diagnosis['pattern']}" if diagnosis["pattern"] else ""
    cause = f"{diagnosis['state']}: {diagnosis['cause']}{pattern}"
    sure = "" if diagnosis["cause"] == "unknown" else f", confidence {diagnosis['confidence']:.2f}"
    lines.append(clean(f"  {cause}{sure}"))
    limit = FULL_WIDTH if full else width
    lines += _summary(view, limit, full=full, colour=colour)
    sections = {title: [_fit(row, limit) for row in rows] for title, rows in _sections(view)}
    shares = _shares({t: len(r) for t, r in sections.items()}, MAX_LINES - len(lines) - 1)
    left_out = []
    for title, rows in sections.items():
        told = rows if full else _bounded(rows, shares[title])
        if told:
            lines += [_paint(title, _BOLD, colour), *(_marked(row, colour) for row in told)]
        elif rows:
            left_out.append(title)
    more = f"; --full: {', '.join(left_out)}" if left_out else ""
    lines.append(clean(_tail(view) + more, limit))
    return "\n".join(lines)


def brief(verdict: Verdict) -> str:
    """The diagnosis as short Markdown, to paste into an issue, a chat or a model's prompt."""
    view = View(verdict)
    diagnosis = view.diagnosis
    lines = [f"**{_no_fence(view.sentence)}**", ""]
    lines.append(f"{verdict.status}: {diagnosis['state']}, cause {diagnosis['cause']}")
    lines += [
        _no_fence(f"- culprit: {who}{f', {where}' if where else ''}")
        for who, where in view.culprits
    ]
    for heading, rows in view.seen:
        lines += ["", f"{heading}:", "```"]
        lines += [
            _no_fence(f"{row['text']}  [{row['source']}]" if row["source"] else row["text"])
            for row in rows[:MAX_BRIEF]
        ]
        if len(rows) > MAX_BRIEF:
            lines.append(f"... {len(rows) - MAX_BRIEF} more")
        lines.append("```")
    if view.steps:
        lines += [
            "",
            "next:",
            *(_no_fence(f"- {t}{f': `{c}`' if c else ''}") for t, c in view.steps),
        ]
    return "\n".join(lines)


def _no_fence(text: str) -> str:
    """Text of an input, which must not open or close a code fence."""
    return clean(text, FULL_WIDTH).replace("```", "` ` `")


def _summary(view: View, limit: int, *, full: bool, colour: bool) -> Iterator[str]:
    """What was seen, before anything that follows from it."""
    sections = view.summary
    if not any(sections.values()):
        return
    yield _paint("seen", _BOLD, colour)
    lines: list[str] = []
    counts = {t: len(rows) for t, rows in sections.items()} if full else shown(sections)
    left = MAX_SUMMARY - sum(count for title, count in counts.items() if title != "before")
    for title, rows in sections.items():
        for row in rows[: counts[title]]:
            if title == "before" and not full and len(lines) >= MAX_SUMMARY:
                break
            told = _wrapped(f"  {row['text']}", limit, 2 if left > 0 else 1)
            left -= len(told) - 1
            lines += told
    yield from lines


_DEEPER = "      "


def _wrapped(row: str, limit: int, lines: int) -> list[str]:
    """In so many lines at most; what is cut is cut in the middle."""
    room = limit + (lines - 1) * (limit - len(_DEEPER))
    told = textwrap.wrap(shorten(row, room), limit, subsequent_indent=_DEEPER)
    # Words do not fill the lines: less room, until they fit.
    while len(told) > lines and room > limit // 2:
        room -= 8
        told = textwrap.wrap(shorten(row, room), limit, subsequent_indent=_DEEPER)
    return told


def _fit(row: str, limit: int) -> str:
    """The line cut to the width; a command stays whole, for copying."""
    return clean(row, FULL_WIDTH if row.startswith(_COMMAND) else limit)


def _shares(wanted: Mapping[str, int], lines: int) -> dict[str, int]:
    """The number of lines of each section: its own limit, and leftovers in the order below."""
    own = {title: min(n, LIMITS[title]) for title, n in wanted.items()}
    spare = lines - sum(1 + n for n in own.values() if n)
    shares = {title: LIMITS[title] for title in wanted}
    for title in _SPARE:
        heading = 0 if own[title] else 1
        more = max(0, min(wanted[title] - shares[title], spare - heading))
        if heading and more < min(_LEAST, wanted[title]):
            continue
        shares[title] += more
        spare -= more + heading if more else 0
    return shares


def _bounded(rows: list[str], limit: int) -> list[str]:
    if len(rows) <= limit:
        return rows
    if limit < 2:  # do not spend a line on saying that there are more
        return rows[:limit]
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
    yield "other readings", list(_readings(view))
    yield "next", list(_steps(view))
    yield "evidence", [f"  {q.place}{': ' + q.text if q.text else ''}" for q in view.all_evidence]
    yield "classes", list(_classes(view))
    yield "who waits for whom", list(_waits(view))
    yield (
        "call paths",
        [line for depth, node in stack_tree.walk(view.roots) for line in _node(depth, node)],
    )
    yield (
        "collectives around the break",
        [line for group in view.timeline for line in _group(group)],
    )
    yield "against it", [f"  {text}" for text in [*view.diagnosis["conflicts"], *view.notes]]


def _readings(view: View) -> Iterator[str]:
    """What else the evidence allows, and what would decide; all that there is without a cause."""
    rows = view.diagnosis.get("candidates", [])
    first = 0 if view.diagnosis["cause"] == "unknown" else 1
    for row in rows[first : first + 3]:
        told = "; ".join(row.get("for", []))
        decides = f" (decides: {row['decides']})" if row.get("decides") else ""
        yield f"  {row['cause']} {row['weight']:.2f}: {told}{decides}"


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
