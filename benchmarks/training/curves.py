"""A picture of learning curves as SVG: reward by step, one line a level. Pure."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 590, 20, 290
# Told apart without colour vision too (Okabe and Ito), on light and on dark pages.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
GREY = "#808080"


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean over the last `window` values up to each."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def picture(curves: Mapping[str, Sequence[float]], *, x: str, y: str, window: int = 5) -> str:
    """Values between 0 and 1 by step, counted from 1; points pale, means of `window` solid.

    Raises:
        ValueError: a curve has fewer than two points, or there are more curves than colours.
    """
    if not 0 < len(curves) <= len(COLOURS) or min(map(len, curves.values())) < 2:
        raise ValueError(f"expected 1 to {len(COLOURS)} curves of at least two points")
    last = max(map(len, curves.values()))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f"<title>{escape(y)} by {escape(x)}</title>",
        *_grid(last),
        _text((LEFT + RIGHT) / 2, HEIGHT - 8, x),
        f'<text x="16" y="{(TOP + BOTTOM) / 2}" fill="{GREY}" text-anchor="middle" '
        f'transform="rotate(-90 16 {(TOP + BOTTOM) / 2})">{escape(y)}</text>',
    ]
    for slot, (label, values) in enumerate(curves.items()):
        means = smoothed(values, window)
        parts += _curve(label, values, means, last=last, colour=COLOURS[slot], slot=slot)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(last: int) -> list[str]:
    parts = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        height = _y(value)
        parts.append(
            f'<path d="M{LEFT} {height:.1f}H{RIGHT}" stroke="{GREY}" stroke-opacity="0.35"/>'
        )
        parts.append(_text(LEFT - 8, height + 4, f"{value:g}", anchor="end"))
    every = next((size for size in (1, 5, 10, 20, 50, 100) if last / size <= 10), 200)
    steps = [1, *range(every, last + 1, every)] if every > 1 else range(1, last + 1)
    return parts + [_text(_x(step, last), BOTTOM + 20, str(step)) for step in steps]


def _curve(
    label: str,
    values: Sequence[float],
    means: Sequence[float],
    *,
    last: int,
    colour: str,
    slot: int,
) -> list[str]:
    lines = [(values, 'stroke-opacity="0.35"'), (means, 'stroke-width="2.5"')]
    parts = []
    for numbers, style in lines:
        points = " ".join(f"{_x(n, last):.1f},{_y(v):.1f}" for n, v in enumerate(numbers, 1))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" {style}/>')
    height = TOP + 20 + 22 * slot
    parts.append(f'<path d="M{RIGHT + 14} {height}h22" stroke="{colour}" stroke-width="2.5"/>')
    parts.append(_text(RIGHT + 42, height + 4, label, anchor="start"))
    return parts


def _text(x: float, y: float, words: str, *, anchor: str = "middle") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} fill="{GREY}">{escape(words)}</text>'


def _x(step: int, last: int) -> float:
    return LEFT + (RIGHT - LEFT) * (step - 1) / (last - 1)


def _y(value: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * min(1.0, max(0.0, value))
