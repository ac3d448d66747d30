"""Places of keys in TOML, against what tomllib reads of the same text."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shakedown.config.toml_places import toml_places

SAMPLE = sorted((Path(__file__).parents[2] / "data" / "foreign" / "prime_rl").glob("*.toml"))

HARD = """a.b = 1 # x = 2
"quoted" = \"\"\"
c = 3 ] }
\"\"\"
rows = [ {x = 1, y = [1,
 2]}, # {z = 1}
 {x = "}"} ]
[[t.u]]
k = '[no] = 1'
[[t.u]]
k = 2
  [t.u.v]
  when = 1979-05-27T07:32:00Z
[[t.u.z]]
e = 3.14
"""


def _paths(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    rows = value.items() if isinstance(value, dict) else enumerate(value)
    for name, child in rows if isinstance(value, dict | list) else ():
        here = (*above, str(name))
        yield here
        if isinstance(child, dict | list):
            yield from _paths(child, here)


@pytest.mark.parametrize(
    "text", [HARD, *(path.read_text() for path in SAMPLE)], ids=["hard", *(p.stem for p in SAMPLE)]
)
def test_every_key_has_the_place_where_it_is_written(text: str) -> None:
    places = toml_places(text)

    lines = text.splitlines()
    # A table that is only a part of a longer header, `[a.b]`, has no place of its own.
    inner = {path[:end] for path in places for end in range(1, len(path))}
    assert (
        set(_paths(tomllib.loads(text))) - inner <= set(places) <= set(_paths(tomllib.loads(text)))
    )
    for path, (line, column) in places.items():
        if not path[-1].isdigit():
            assert lines[line - 1][column - 1 :].lstrip('"').startswith(path[-1])


def test_keys_of_arrays_of_tables_are_told_apart() -> None:
    places = toml_places(HARD)

    assert places["t", "u", "0", "k"] == (9, 1)
    assert places["t", "u", "1", "k"] == (11, 1)
    assert places["t", "u", "1", "v", "when"] == (13, 3)
    assert places["rows", "1", "x"] == (7, 3)


def test_text_that_is_no_toml_has_an_end() -> None:
    assert toml_places("a = [ } ]\n[[[\n{ ] }\n")["a",] == (1, 1)


@given(st.text(alphabet="ab=[]{}.,'\"# \n1", max_size=60))
def test_any_text_has_an_answer(text: str) -> None:
    places = toml_places(text)

    assert all(line >= 1 and column >= 1 for line, column in places.values())
