"""What the scoreboard of comparisons counts as right, and what it writes."""

from collections.abc import Sequence

import pytest
from consistency_scoreboard import Run, page
from consistency_troubles import Case, told

from shakedown.core.verdict import Finding, Status, Verdict

CASE = Case("one layer off", ("FAIL",), ("factor_weights", "layer: model.layers.1", "1.05 times"))
WEIGHTS = Finding("factor_weights", "fail", subject="engine against reference")
LAYER = Finding("layer", "warn", subject="model.layers.1")
METRIC = Finding("k3", "fail", measured=1.0)


def verdict(
    findings: Sequence[Finding], *, status: Status = "FAIL", summary: str = "1.05 times"
) -> Verdict:
    return Verdict("consistency", status, summary, findings)


def test_the_expected_names_and_effects_of_them_are_right() -> None:
    found = verdict([METRIC, WEIGHTS, LAYER, Finding("factor_precision", "pass")])

    assert told(found) == ["factor_weights: engine against reference", "layer: model.layers.1"]
    assert CASE.is_right(found)


@pytest.mark.parametrize(
    "found",
    [
        verdict([WEIGHTS, LAYER], status="WARN"),
        verdict([WEIGHTS, LAYER], summary="another number"),
        verdict([WEIGHTS]),
        verdict([WEIGHTS, Finding("layer", "warn", subject="model.layers.2")]),
        verdict([WEIGHTS, LAYER, Finding("factor_precision", "warn")]),
    ],
    ids=["status", "summary", "no layer", "another layer", "an innocent factor"],
)
def test_anything_else_is_wrong(found: Verdict) -> None:
    assert not CASE.is_right(found)


def test_the_page_counts_what_is_right_and_tells_what_is_not() -> None:
    runs = [
        Run(CASE, True, "FAIL", ("layer: model.layers.1",), 3.0, "named"),
        Run(CASE, False, "PASS", (), 4.0, "nothing was seen"),
    ]

    text = page(runs)

    assert "In all: 1 of 2 right." in text
    assert "| yes | 3 |" in text
    assert "Not right, one layer off: nothing was seen" in text
