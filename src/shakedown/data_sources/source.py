"""Names of data sources, `[FORMAT=]PLACE`, parsed without reading anything."""

from dataclasses import dataclass, replace

from shakedown.core.errors import UsageError, look_up
from shakedown.data_sources.formats import FORMATS, RowFormat

HUB_PREFIX = "hub:"
DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class DataSource:
    """`place`: a file, or `hub:NAME[:SPLIT]`. `form`: a key of FORMATS; empty: rows are used as
    they are."""

    place: str
    form: str = ""

    @property
    def hub(self) -> bool:
        """Whether the rows come from the hub."""
        return self.place.startswith(HUB_PREFIX)

    @property
    def format(self) -> RowFormat | None:
        """The known data set that the rows come from."""
        return FORMATS[self.form] if self.form else None

    def __str__(self) -> str:
        """A name that parses to the same source."""
        return f"{self.form}={self.place}" if self.form else self.place


def parse_source(text: str, *, form: str = "", heldout: bool = False) -> DataSource:
    """Parse a data source's name.

    Args:
        text: `[FORMAT=]PLACE`; a known data set's name is its place on the hub, and a place on the
            hub that is a known data set's has its format.
        form: the format if `text` has none.
        heldout: use the held-out split of a known data set that is named without one.

    Raises:
        UsageError: `form` is not a known format.
    """
    if form:
        look_up("data format", form, FORMATS, error=UsageError)
    head, mark, rest = text.partition("=")
    source = DataSource(rest, head) if mark and head in FORMATS else DataSource(text)
    name, colon, split = source.place.removeprefix(HUB_PREFIX).partition(":")
    known = next((key for key, each in FORMATS.items() if source.hub and each.hub == name), "")
    if not source.hub and name in FORMATS:
        known, name = name, FORMATS[name].hub
    if known:
        chosen = FORMATS[known].heldout if heldout else FORMATS[known].train
        source = replace(source, place=f"{HUB_PREFIX}{name}:{split if colon else chosen}")
    return replace(source, form=source.form or known or form)


def is_hub(source: str) -> bool:
    """Whether `source` names a data set on the hub."""
    return parse_source(source).hub
