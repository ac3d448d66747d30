"""Ranks as text: merged into ranges, and bounded."""

import re
from collections.abc import Iterable


def runs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Neighbouring ranks as (first, last), in order: 0, 1, 2, 7 gives (0, 2), (7, 7)."""
    found: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found


def ranges(ranks: Iterable[int], limit: int = 8) -> str:
    """`0-2, 7, 8`; more than `limit` ranges end in `+5 more ranges`."""
    merged = runs(ranks)
    shown = [_run(first, last) for first, last in merged[:limit]]
    if len(merged) > limit:
        shown.append(f"+{len(merged) - limit} more ranges")
    return ", ".join(shown)


def _run(first: int, last: int) -> str:
    if last - first < 2:
        return str(first) if first == last else f"{first}, {last}"
    return f"{first}-{last}"


def named(ranks: Iterable[int], limit: int = 8) -> str:
    """`rank 3`, `ranks 0-2, 7`, `no rank`."""
    known = set(ranks)
    if not known:
        return "no rank"
    return f"{'rank' if len(known) == 1 else 'ranks'} {ranges(known, limit)}"


def natural(name: str) -> list[tuple[int, str]]:
    # Names may be hostile: int() refuses more than 4300 digits (Python 3.11), so a longer number is
    # cut. -1 makes text and numbers comparable, by the tuple's second part.
    """A key that sorts `t2` before `t10`."""
    return [(int(p) if p.isdecimal() else -1, p) for p in re.split(r"(\d{1,18})", name)]
