"""Collectives around the break, a table a process group: who has entered and done what. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shakedown.core.ranges import ranges
from shakedown.diagnosis.facts import Facts
from shakedown.diagnosis.groups import GroupFacts, GroupView
from shakedown.diagnosis.records import Operation
from shakedown.stacks.frames import user_frames

MAX_GROUPS = 8
BEFORE, AFTER = 3, 3  # sequence numbers shown on either side of the break
_NO_ENTRY = "not in the dump"
MAX_CALLS = 8  # different calls at one sequence number


def timeline(facts: Facts, culprits: Iterable[int]) -> list[dict[str, Any]]:
    """Groups with a break first, those of `culprits` before the rest; at most `MAX_GROUPS`.

    Each is {`group`, `members`, `silent`, `break`, `rows`}; a row is {`seq`, `calls`, `missing`}
    and a call {`op`, `sizes`, `dtypes`, `where`, `state` done|started, `ranks`}. Ranks are text.
    `break` is the first number that is not done everywhere, or at which names or types part.
    """
    culprit = set(culprits)
    ordered = sorted(
        (g for g in facts.groups if any(v.enqueued > 0 for v in g.views.values())),
        key=lambda g: (break_of(g) is None, not culprit & set(g.members), -len(g.members)),
    )
    broken = [g for g in ordered if break_of(g) is not None]
    return [*_pending_p2p(facts), *(_group(g) for g in (broken or ordered[:1])[:MAX_GROUPS])]


def break_of(group: GroupFacts) -> int | None:
    """The first sequence number that is not done everywhere; None when all stand together."""
    views = [v for v in group.views.values() if v.operations or v.enqueued > 0]
    if not views:
        return None
    first = min(v.completed for v in views) + 1
    if len(views) == len(group.members) and first > max(v.enqueued for v in views):
        return None
    if first > max(v.enqueued for v in views):
        return None
    # Calls that differ can end as done nevertheless: then the ranks parted before the first open
    # one.
    while first > 1 and _parted(views, first - 1):
        first -= 1
    return first


def _parted(views: Sequence[GroupView], seq: int) -> bool:
    calls = {(op.name, op.dtypes) for v in views if (op := v.operations.get(seq))}
    return len(calls) > 1


def _group(group: GroupFacts) -> dict[str, Any]:
    at = break_of(group)
    newest = max(v.enqueued for v in group.views.values())
    middle = newest if at is None else at
    first = max(1, middle - BEFORE)
    last = min(newest, middle + AFTER)
    rows = [_row(group, seq) for seq in range(first, last + 1)]
    # Rows that no dump goes back to say the same: one of them is kept.
    old = [row for row in rows if row["seq"] < middle and _old(row)]
    silent = sorted(set(group.members) - set(group.views))
    return {
        "group": group.description or "group",
        "members": ranges(group.members),
        "silent": ranges(silent),
        "break": at,
        "rows": [row for row in rows if row not in old[:-1]],
    }


def _old(row: Mapping[str, Any]) -> bool:
    return all(call["op"] == _NO_ENTRY for call in row["calls"])


def _row(group: GroupFacts, seq: int) -> dict[str, Any]:
    calls: dict[tuple[str, str, str, str, str], list[int]] = {}
    told: dict[int, tuple[str, str, str, str]] = {}  # by identity: ranks share equal calls
    missing = []
    for rank, view in group.views.items():
        op = view.operations.get(seq)
        if op is None and seq > view.enqueued:
            missing.append(rank)
            continue
        # Either is enough: on gloo the counters may lag behind the entries.
        done = op.done or seq <= view.completed if op else seq <= view.completed
        if id(op) not in told:
            told[id(op)] = _told(op)
        key = (*told[id(op)], "done" if done else "started")
        calls.setdefault(key, []).append(rank)
    return {"seq": seq, "calls": _calls(calls), "missing": ranges(missing)}


def _told(op: Operation | None) -> tuple[str, str, str, str]:
    if op is None:  # older than the recorder's buffer, or counted in the status alone
        return _NO_ENTRY, "", "", ""
    users = user_frames(op.frames)
    where = str(users[-1]) if users else ""
    sizes = " ".join(str(list(size)) for size in op.sizes[:2])
    return op.name.split(":", 1)[-1], sizes, ", ".join(op.dtypes[:2]), where


def _calls(found: Mapping[tuple[str, str, str, str, str], list[int]]) -> list[dict[str, str]]:
    by_size = sorted(found.items(), key=lambda row: -len(row[1]))
    rows = [
        {
            "op": op,
            "sizes": sizes,
            "dtypes": dtypes,
            "where": where,
            "state": state,
            "ranks": ranges(ranks),
        }
        for (op, sizes, dtypes, where, state), ranks in by_size[:MAX_CALLS]
    ]
    rest = by_size[MAX_CALLS:]
    if rest:
        states = {key[-1] for key, _ in rest}
        other = {"op": f"{len(rest)} other calls", "sizes": "", "dtypes": "", "where": ""}
        state = states.pop() if len(states) == 1 else "done or started"
        members = (rank for _, ranks in rest for rank in ranks)
        rows.append({**other, "state": state, "ranks": ranges(members)})
    return rows


def _pending_p2p(facts: Facts) -> list[dict[str, Any]]:
    """Each rank's first point-to-point call that is not done: these have no common number."""
    by_seq: dict[int, dict[tuple[str, str, str, str, str], list[int]]] = {}
    for rank, component in facts.ranks.items():
        record = component.record
        undone = [op for op in record.operations if op.p2p and not op.done] if record else []
        if undone:
            op = min(undone, key=lambda row: row.order)
            key = (*_told(op), "started")
            by_seq.setdefault(op.seq, {}).setdefault(key, []).append(rank)
    if not by_seq:
        return []
    rows = [
        {"seq": seq, "calls": _calls(calls), "missing": ""}
        for seq, calls in sorted(by_seq.items())[: 2 * MAX_GROUPS]
    ]
    ranks = {r for calls in by_seq.values() for members in calls.values() for r in members}
    head = {"group": "point-to-point calls that are not done", "members": ranges(ranks)}
    return [{**head, "silent": "", "break": None, "rows": rows}]
