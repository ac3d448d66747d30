"""The table of formats in docs/hang.md, from the readers: `python scripts/hang_table.py`."""

from pathlib import Path

from shakedown.diagnosis.read.registry import JSON_FORMATS, TEXT_FORMATS

PAGE = Path(__file__).parents[1] / "docs" / "hang.md"
BEGIN, END = "<!-- formats: scripts/hang_table.py -->", "<!-- end of formats -->"


def table() -> str:
    """A row a format, in Markdown."""
    rows = ["| format | recognised by |", "|---|---|"]
    texts = [(name, row.recognised_by) for name, row in TEXT_FORMATS.items()]
    values = [(name, row.recognised_by) for name, row in JSON_FORMATS.items()]
    rows += [f"| {name} | {told} |" for name, told in [*texts, *values]]
    return "\n".join(rows)


def page() -> str:
    """The page with the table of now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
