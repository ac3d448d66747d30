"""docs/hang.md lists the formats that the readers know."""

import hang_table


def test_the_page_has_the_formats_of_now() -> None:
    text = hang_table.PAGE.read_text(encoding="utf-8")

    assert hang_table.page() == text, "run: python scripts/hang_table.py"
