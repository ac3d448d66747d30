"""How the pages' templates are read: all text of a run is escaped, and visible."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from shakedown.core.visible import visible


def page_environment() -> Environment:
    """The environment of every page, with the templates of this package."""
    return Environment(
        loader=PackageLoader("shakedown.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shown(value: Any) -> Any:
    """What an expression writes; markup of our own templates is left alone."""
    # Escaping keeps the marks that reorder text: in a browser they act across tags.
    return value if hasattr(value, "__html__") else visible(str(value))
