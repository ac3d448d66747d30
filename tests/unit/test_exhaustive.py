"""The table of tests that `make test` leaves out fits the tests that there are."""

import re
from pathlib import Path

from tests import exhaustive

ROOT = Path(__file__).parents[2]


def test_each_row_names_a_test_that_exists() -> None:
    missing = [row for row in exhaustive.rows() if not _tests_of(row)]

    assert not missing


def test_each_row_says_what_proves_the_same() -> None:
    assert all(exhaustive.rows().values())


def _tests_of(beginning: str) -> list[str]:
    place, _, name = beginning.partition("::")
    name = name.rpartition("::")[2].partition("[")[0]
    path = ROOT / place
    files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    names = [found for f in files for found in re.findall(r"def (test_\w+)", f.read_text("utf-8"))]
    return [found for found in names if found.startswith(name)]
