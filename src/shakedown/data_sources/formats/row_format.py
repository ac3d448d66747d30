"""The format of a known data set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shakedown.core.errors import UsageError


@dataclass(frozen=True)
class RowFormat:
    """A known data set: where it is, and how its rows become `messages` and `answer`.

    Attributes:
        hub: its name on the hub; `hub_config`: the configuration there (empty: the only one).
        columns: those that `convert` reads, all of them text; nothing else is decoded.
        train, heldout: the split for training, and the split that is never trained on.
        images: whether the problems have a column `images`, which a text-only stage leaves out.
            They are shown before the problem's text.
    """

    hub: str
    columns: tuple[str, ...]
    convert: Callable[[Mapping[str, str]], dict[str, Any]]
    hub_config: str = ""
    train: str = "train"
    heldout: str = "test"
    images: bool = False

    def row(self, body: Mapping[str, Any], place: str, *, images: bool = False) -> dict[str, Any]:
        """The row as `messages` and `answer`; with `images`, these too, shown in the last message.

        Raises:
            UsageError: a column is missing or of another type; names the place.
        """
        for column in self.columns:
            if not isinstance(body.get(column), str):
                found = "nothing" if column not in body else type(body[column]).__name__
                raise UsageError(
                    f"{place}: `{column}` must be text, got {found}; "
                    f"keys: {', '.join(body) or 'none'}",
                    hint=f"rows of {self.hub} have {', '.join(self.columns)}",
                )
        row = self.convert({column: body[column] for column in self.columns})
        if not (images and self.images):
            return row
        shown = body.get("images")
        if not isinstance(shown, list) or not shown:
            raise UsageError(f"{place}: `images` must be a list with at least one image")
        *first, last = row["messages"]
        text = {"type": "text", "text": last["content"]}
        content = [*({"type": "image"} for _ in shown), text]
        return {**row, "messages": [*first, {**last, "content": content}], "images": shown}
