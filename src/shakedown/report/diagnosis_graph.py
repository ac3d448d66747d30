"""The wait-for graph as boxes and arrows, in pixels: a chain runs down, everything else to the
right."""

from collections import defaultdict
from dataclasses import dataclass, replace

from shakedown.diagnosis.wait_graph import Graph, GraphNode

WIDTH, HEIGHT = 240, 50  # width and height of a box
GAP_X, GAP_Y = 110, 22
GAP_DOWN = 58  # gap between the boxes of a chain, with room for a number on the arrow
MARGIN = 6
MAX_NUMBERS = 16  # more numbers would overlap
MAX_DOWN = 4  # up to this many boxes are stacked in any order, which fits a phone


@dataclass(frozen=True)
class Box:
    """A node with its upper left corner."""

    node: GraphNode
    x: int
    y: int
    text: str


@dataclass(frozen=True)
class Arrow:
    """A path, and the position of its number in the table below the drawing (0: none)."""

    path: str
    x: int
    y: int
    number: int
    cyclic: bool


@dataclass(frozen=True)
class Drawing:
    """Everything in pixels; `box`: width and height of each box."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    box: tuple[int, int] = (WIDTH, HEIGHT)


def draw(graph: Graph) -> Drawing:
    """The layout: a waiter is left of or above the awaited; culprits come last."""
    columns = _columns(graph)
    gap = GAP_DOWN if len(columns) == 1 else GAP_Y
    tallest = max((len(rows) for rows in columns), default=0)
    height = 2 * MARGIN + tallest * (HEIGHT + gap) - gap
    at: dict[int, tuple[int, int]] = {}
    for column, rows in enumerate(columns):
        top = (height - len(rows) * (HEIGHT + gap) + gap) // 2
        for i, node in enumerate(rows):
            at[node] = (MARGIN + column * (WIDTH + GAP_X), top + i * (HEIGHT + gap))
    boxes = tuple(Box(graph.nodes[i], x, y, _cut(graph.nodes[i].label)) for i, (x, y) in at.items())
    arrows = tuple(
        _arrow(at[edge.waiter], at[edge.awaited], number, cyclic=edge.cyclic)
        for number, edge in enumerate(graph.edges, start=1)
    )
    width = max((a.x + MARGIN + 20 for a in arrows), default=0)
    width = max(width, 2 * MARGIN + len(columns) * (WIDTH + GAP_X) - GAP_X)
    if len(arrows) > MAX_NUMBERS:
        arrows = tuple(replace(arrow, number=0) for arrow in arrows)
    return Drawing(width, max(height, 80), boxes, arrows)


def _columns(graph: Graph) -> list[list[int]]:
    layers: dict[int, list[int]] = defaultdict(list)
    for i, node in enumerate(graph.nodes):
        layers[node.layer].append(i)
    columns = [layers[layer] for layer in sorted(layers, reverse=True)]
    if len(graph.nodes) <= MAX_DOWN or all(len(rows) == 1 for rows in columns):
        return [[node for rows in columns for node in rows]]
    if len(columns) == 1:  # all on one circle: two columns show it
        half = -(-len(columns[0]) // 2)
        return [columns[0][:half], columns[0][half:]]
    return columns


def _arrow(a: tuple[int, int], b: tuple[int, int], number: int, *, cyclic: bool) -> Arrow:
    """Arrows in both directions between two boxes use different sides."""
    (ax, ay), (bx, by) = a, b
    if ax != bx:
        return _across(a, b, number, cyclic=cyclic)
    if abs(by - ay) == HEIGHT + GAP_DOWN:  # neighbours in a chain
        x = ax + (WIDTH // 3 if by > ay else 2 * WIDTH // 3)
        y1, y2 = (ay + HEIGHT, by - 3) if by > ay else (ay, by + HEIGHT + 3)
        return Arrow(f"M{x} {y1}V{y2}", x, (y1 + y2) // 2, number, cyclic)
    x, bend = ax + WIDTH, 40 + 8 * (number % 3)
    y1, y2 = (ay + 10, ay + HEIGHT - 10) if a == b else (ay + HEIGHT // 2, by + HEIGHT // 2)
    path = f"M{x} {y1}C{x + bend} {y1} {x + bend} {y2} {x + 3} {y2}"
    return Arrow(path, x + bend * 3 // 4, (y1 + y2) // 2, number, cyclic)


def _across(a: tuple[int, int], b: tuple[int, int], number: int, *, cyclic: bool) -> Arrow:
    """A curve from a box's side to the side of one in another column."""
    (ax, ay), (bx, by) = a, b
    right = bx > ax
    x1, x2 = (ax + WIDTH, bx - 3) if right else (ax, bx + WIDTH + 3)
    lift = -12 if right else 12
    y1, y2 = ay + HEIGHT // 2 + lift, by + HEIGHT // 2 + lift
    half = (x1 + x2) // 2
    along = 0.384 if right else 0.616  # of the curve at a third of its way
    return Arrow(
        f"M{x1} {y1}C{half} {y1} {half} {y2} {x2} {y2}",
        round(min(x1, x2) + abs(x2 - x1) * along),
        round(y1 + (y2 - y1) * _ease(0.35)),
        number,
        cyclic,
    )


def _ease(t: float) -> float:
    """The curve's height at `t`; its control points are level with its ends."""
    return 3 * (1 - t) * t * t + t**3


def _cut(text: str, limit: int = 25) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
