"""docs/preflight.md holds the table of the checks that run."""

from dataclasses import fields
from pathlib import Path

import preflight_table

from shakedown.preflight.checks import CHECKS
from shakedown.preflight.datatypes import Expectations


def test_the_page_holds_the_generated_table() -> None:
    text = Path(preflight_table.PAGE).read_text(encoding="utf-8")

    assert preflight_table.page(text) == text, "run: python scripts/preflight_table.py"


def test_every_row_measures_or_compares_and_says_its_threshold() -> None:
    known = {field.name for field in fields(Expectations)}
    for check in CHECKS.values():
        assert check.judge or check.compare
        assert check.measure or not check.judge
        assert check.limit
        assert not check.needs or check.needs in known
