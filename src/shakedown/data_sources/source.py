"""Names of data: `[FORMAT=]PLACE` to what it means; nothing is read."""

from dataclasses import dataclass, replace

from shakedown.core.errors import UsageError, look_up
from shakedown.data_sources.formats import FORMATS, RowFormat

HUB_PREFIX = "hub:"
DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class DataSource:
    """`place`: a file, or `hub:NAME[:SPLIT]`. `form`: a key of FORMATS; empty: as they stand."""

    place: str
    form: str = ""

    @property
    def hub(self) -> bool:
        """Whether the rows come from the hub."""
        return self.place.startswith(HUB_PREFIX)

    @property
    def format(self) -> RowFormat | None:
        """The known data set that the rows are from."""
        return FORMATS[self.form] if self.form else None

    def __str__(self) -> str:
        """A name that is parsed to the same source."""
        return f"{self.form}={self.place}" if self.form else self.place


def parse_source(text: str, *, form: str = "", heldout: bool = False) -> DataSource:
    """What a name means.

    Args:
        text: `[FORMAT=]PLACE`; a known data set's name is its place on the hub, and a place on the
            hub that is a known data set's has its format.
        form: the format where `text` has none.
        heldout: take the held-out split where a known data set is named without one.

    Raises:
        UsageError: `form` is no known format.
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
