"""What a terminal or a page shows of text that others wrote."""

import io
import sys
import unicodedata

import pytest

from shakedown.core.visible import masked, unguarded, visible, visible_output

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def test_every_control_format_and_separator_character_shows_and_no_other_changes() -> None:
    for code in range(sys.maxunicode + 1):
        sign = chr(code)
        if unicodedata.category(sign) == "Cn":  # assigned by a later Unicode than this Python's
            continue
        shown = visible(sign)
        if sign in "\t\n" or unicodedata.category(sign) not in HIDDEN:
            assert shown == sign, hex(code)
        else:
            assert shown.isascii(), hex(code)
            assert shown.startswith("\\"), hex(code)
            assert masked(sign) == "?", hex(code)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2J\tb\nc", "a\\x1b[2J\tb\nc"),
        ("safe\u202egnp.exe", "safe\\u202egnp.exe"),
        ("\U000e0041", "\\U000e0041"),
        ("rank\udcff", "rank\\xff"),
        ("half\ud800", "half\\ud800"),
        ("Größe 数 ✓", "Größe 数 ✓"),
    ],
)
def test_hidden_characters_show_as_python_escapes_them(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_one_mark_a_character_keeps_the_length() -> None:
    assert masked("a\x1b[2Jb\nc\ud800é") == "a?[2Jb\nc?é"


def test_what_a_block_prints_is_visible_and_the_streams_come_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sys.stdout, sys.stderr
    with visible_output():
        print("\x1b]0;out\x07")
        sys.stderr.writelines(["\x9bm", "\u2066"])
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("\\x1b]0;out\\x07\n", "\\x9bm\\u2066")


def test_own_escape_sequences_pass_below_the_guard(capsys: pytest.CaptureFixture[str]) -> None:
    with visible_output():
        print("\x1b[1mbold\x1b[0m", file=unguarded(sys.stdout))
    assert capsys.readouterr().out == "\x1b[1mbold\x1b[0m\n"


def test_what_an_encoding_lacks_is_escaped_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with visible_output():
        print("größe", flush=True)
    assert raw.getvalue() == b"gr\\xf6\\xdfe\n"


def test_a_stream_that_was_closed_or_given_up_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with visible_output():
        print("nobody reads this")
        assert sys.stdout is None
        monkeypatch.setattr(sys, "stderr", None)
    assert sys.stderr is None
