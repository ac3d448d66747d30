"""Numbers, times and sizes as text for people, and the pages' templates."""

import math
import re
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shakedown.core.visible import visible


def number(value: float) -> str:
    """Four significant digits; thousands are separated, very small values use an exponent."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if value == int(value) and size < 1e7:
        return f"{int(value):,}"
    if size >= 1e7 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}".rstrip("0").rstrip(".")


def duration(seconds: float) -> str:
    """`850 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400:,} d {whole % 86400 // 3600} h"


def size(count: int) -> str:
    """Bytes as `0 B`, `812 B`, `3.4 KB`, `12 MB` (powers of 1000)."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def clock(text: str) -> str:
    """An ISO 8601 time as `2026-01-31 03:12:09 UTC`; anything else unchanged."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if moment.tzinfo else text
    except (ValueError, OverflowError):
        return text


def clock_of(seconds: float) -> str:
    """Seconds since 1970 in the form of `clock`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(count: int, noun: str) -> str:
    """`1 warning`, `3 warnings`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shorten(value: object, limit: int = 300) -> str:
    """Any value as one bounded piece of text; floats as `number` writes them."""
    if isinstance(value, float):
        return number(value)
    text = "" if value is None else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


_LONG_NAME = re.compile(r"[^\s/()\0]{27,}")  # too long for a phone's line in a branch of call paths


def page_environment() -> Environment:
    """The template environment of every page: all text of a run is escaped and made visible."""
    environment = Environment(
        loader=PackageLoader("shakedown.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    return environment


def breakable(value: object) -> Markup:
    """Code paths with possible line breaks after a `/`, and long names after a `_` or `.`.

    A browser finds no such place by itself: on a phone it would break words anywhere.
    """
    # `visible` leaves no NUL character, so it can mark the places.
    marked = re.sub(r"(?<=\w/)", "\0", visible(str(value)))
    marked = _LONG_NAME.sub(lambda name: re.sub(r"(?<=\w[._])(?=\w)", "\0", name[0]), marked)
    return Markup("<wbr>").join(marked.split("\0"))


def _shown(value: Any) -> Any:
    """The output of an expression; markup from our own templates is left alone."""
    # Escaping would keep marks that reorder text, which in a browser act across tags.
    return value if hasattr(value, "__html__") else visible(str(value))
