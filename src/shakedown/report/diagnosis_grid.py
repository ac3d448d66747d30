"""The grid of ranks: one cell per rank while readable, else a map with one path per class."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shakedown.core.ranges import ranges, runs
from shakedown.diagnosis.advice import spans

MAX_CELLS = 256  # limit of individually readable cells
MAX_MAP = 16384  # cells of the map; with more ranks several share a cell
MAP_COLUMNS = 128
MAX_HOST_ROWS = 24
MAX_MERGED = 12


@dataclass(frozen=True)
class Cell:
    """One rank."""

    rank: int
    number: int
    culprit: bool


@dataclass(frozen=True)
class HostRow:
    """One host, or `hosts` similar neighbours."""

    label: str
    cells: tuple[Cell, ...]
    told: str
    culprit: bool


@dataclass(frozen=True)
class Map:
    """An SVG of `columns` by `rows` unit cells; `paths`: class number -> path data."""

    columns: int
    rows: int
    per_cell: int
    paths: tuple[tuple[int, str], ...]
    culprits: str
    ticks: tuple[tuple[int, int], ...]  # row, its first rank


def cells_of(classes: Sequence[Sequence[int]], culprits: frozenset[int]) -> list[Cell]:
    """Ranks in order. A culprit without a class has number -1."""
    known = {rank: n for n, ranks in enumerate(classes) for rank in ranks}
    everyone = sorted({*known, *culprits})
    return [Cell(rank, known.get(rank, -1), rank in culprits) for rank in everyone]


def rank_map(cells: Sequence[Cell]) -> Map:
    """The map's cells: equal neighbours in a row form one rectangle; a culprit determines a shared
    cell."""
    per_cell = -(-len(cells) // MAX_MAP)
    shared = [cells[i : i + per_cell] for i in range(0, len(cells), per_cell)]
    columns = min(MAP_COLUMNS, max(16, 8 * round(len(shared) ** 0.5 / 8)))
    numbers = [next((c.number for c in part if c.culprit), part[0].number) for part in shared]
    paths: dict[int, list[str]] = defaultdict(list)
    for start in range(0, len(numbers), columns):
        row = numbers[start : start + columns]
        at = 0
        while at < len(row):
            end = at
            while end < len(row) and row[end] == row[at]:
                end += 1
            paths[row[at]].append(_box(at, start // columns, end - at))
            at = end
    culprit = [i for i, part in enumerate(shared) if any(c.culprit for c in part)]
    rows = -(-len(shared) // columns)
    step = max(1, rows // 8)
    ticks = tuple((r, shared[r * columns][0].rank) for r in range(0, rows, step))
    outline = "".join(_frames(culprit, columns))
    ordered = tuple((n, "".join(d)) for n, d in sorted(paths.items()))
    return Map(columns, rows, per_cell, ordered, outline, ticks)


def _box(column: int, row: int, width: int) -> str:
    return f"M{column} {row}h{width}v1h-{width}z"


def _frames(cells: Sequence[int], columns: int) -> list[str]:
    """Rectangles around neighbouring cells, split at the ends of rows."""
    found = []
    for first, last in runs(cells):
        for row in range(first // columns, last // columns + 1):
            start = max(first, row * columns)
            end = min(last, (row + 1) * columns - 1)
            found.append(_box(start % columns, row, end - start + 1))
    return found


def host_rows(
    cells: Sequence[Cell], hosts: Mapping[str, str], labels: Sequence[str]
) -> list[HostRow]:
    """Hosts with a culprit first, one row each; the others merged if their classes agree."""
    by_rank = {cell.rank: cell for cell in cells}
    rows: list[HostRow] = []
    alike: dict[str, list[tuple[str, list[Cell]]]] = defaultdict(list)
    for host, text in hosts.items():
        mine = [by_rank[r] for r in _members(text, by_rank)]
        if not mine:
            continue
        culprit = any(c.culprit for c in mine)
        if (culprit and len(rows) < MAX_HOST_ROWS) or len(cells) <= MAX_CELLS:
            rows.append(HostRow(host, tuple(mine[:64]), _told(mine, labels), culprit))
        else:
            alike[_told(mine, labels)].append((host, mine))
    rows.sort(key=lambda row: not row.culprit)
    merged = sorted(alike.items(), key=lambda item: -len(item[1]))
    for told, members in merged[:MAX_MERGED]:
        names = [host for host, _ in members]
        label = names[0] if len(names) == 1 else f"{len(names)} hosts, {names[0]} to {names[-1]}"
        rows.append(HostRow(label, (), f"{told} each" if len(names) > 1 else told, False))
    if len(merged) > MAX_MERGED:
        rest = sum(len(members) for _, members in merged[MAX_MERGED:])
        rows.append(HostRow(f"{rest} further hosts", (), "other mixtures of classes", False))
    return rows


def _members(text: str, known: Mapping[int, Cell]) -> list[int]:
    """The known ranks of a host; a range beyond all ranks is cut."""
    return [r for a, b in spans(text) for r in range(a, min(b, a + len(known)) + 1) if r in known]


def _told(cells: Sequence[Cell], labels: Sequence[str]) -> str:
    counts: dict[int, int] = defaultdict(int)
    for cell in cells:
        counts[cell.number] += 1
    return ", ".join(
        f"{count} in {labels[n] if 0 <= n < len(labels) else 'no class'}"
        for n, count in sorted(counts.items())
    )


def summary(ranks: Sequence[int]) -> str:
    """`3 ranks: 0-2`."""
    return f"{len(ranks):,} rank{'s' if len(ranks) != 1 else ''}: {ranges(ranks)}"
