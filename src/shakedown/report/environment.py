"""How the pages' templates are read: all text of a run is escaped, and visible."""

import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shakedown.core.visible import visible

_LONG_NAME = re.compile(r"[^\s/()\0]{27,}")  # does not fit a phone's line in a branch of call paths


def page_environment() -> Environment:
    """The environment of every page, with the templates of this package."""
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
    """Paths of code that may go on in a new line behind a `/`, and long names behind a `_` or `.`.

    A browser knows no such place in them: on a phone it would cut words anywhere.
    """
    # `visible` leaves no zero character, so it can mark the places.
    marked = re.sub(r"(?<=\w/)", "\0", visible(str(value)))
    marked = _LONG_NAME.sub(lambda name: re.sub(r"(?<=\w[._])(?=\w)", "\0", name[0]), marked)
    return Markup("<wbr>").join(marked.split("\0"))


def _shown(value: Any) -> Any:
    """What an expression writes; markup of our own templates is left alone."""
    # Escaping keeps the marks that reorder text: in a browser they act across tags.
    return value if hasattr(value, "__html__") else visible(str(value))
