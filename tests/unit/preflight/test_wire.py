"""Results as lines among other output: long, mixed, damaged."""

import itertools
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from shakedown.preflight import wire_format

BODY = {"node": "n1", "text": "é" * 50, "numbers": list(range(5000))}


def decode(text: str) -> list[dict[str, Any]]:
    return wire_format.WireDecoder().feed(f"{text}\n".encode(errors="replace"))


def test_a_message_survives_among_other_output() -> None:
    log = "\n".join(["warning: x", *wire_format.encode(BODY), "Traceback"])

    assert decode(log) == [BODY]
    assert wire_format.plain_lines(log) == ["warning: x", "Traceback"]


def test_lines_stay_below_slurms_cut() -> None:
    lines = wire_format.encode(BODY)

    assert len(lines) > 1
    assert max(map(len, lines)) < 1000


def test_pieces_of_several_tasks_may_be_mixed() -> None:
    first, second = wire_format.encode(BODY), wire_format.encode({**BODY, "node": "n2"})
    mixed = [line for pair in itertools.zip_longest(first, reversed(second)) for line in pair]

    nodes = {message["node"] for message in decode("\n".join(filter(None, mixed)))}

    assert nodes == {"n1", "n2"}


def test_an_incomplete_or_damaged_message_counts_as_missing() -> None:
    lines = wire_format.encode(BODY)
    damaged = [lines[0][:-5] + "!!!!!", *lines[1:]]

    assert decode("\n".join(lines[:-1])) == []
    assert decode("\n".join(damaged)) == []
    assert decode("@shakedown x 1/99999999 abc\n@shakedown x y/z abc\n@shakedown") == []


@given(st.text())
@example("a 1/" + "9" * 5000 + " x")
def test_any_text_is_read_without_an_error(text: str) -> None:
    log = "\n".join([f"@shakedown {text}", f"@shakedown a 1/1 {text}", *wire_format.encode(BODY)])

    assert decode(log)[-1] == BODY


def test_a_log_may_come_in_pieces_of_any_size() -> None:
    text = "\n".join(["warning", *wire_format.encode(BODY), ""]).encode()
    decoder = wire_format.WireDecoder()

    found = [m for begin in range(0, len(text), 97) for m in decoder.feed(text[begin : begin + 97])]

    assert found == [BODY]
