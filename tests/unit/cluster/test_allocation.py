"""Allocation strings: what AReaL accepts, what it refuses, and where the caret points."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shakedown.cli import main
from shakedown.cluster.allocation import AllocationError, AllocationPart, parse_allocation

DATA = Path(__file__).parents[2] / "data"
SIZES = st.integers(min_value=1, max_value=64)


@pytest.mark.parametrize(
    ("text", "worlds", "gpus"),
    [
        ("sglang:d4t2", [8], 8),
        ("sglang:d4p1t1+fsdp:d8", [4, 8], 12),
        ("sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4", [2, 4, 4], 6),
        ("fsdp : d4 t2", [8], 8),
        ("  vllm\t:\nd2  ", [2], 2),
        ("megatron:t2p2d2c2e4", [16], 16),
        ("archon:d2e2", [2], 2),
        ("fsdp:d4p1e1", [4], 4),
        ("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)", [32], 32),
        ("megatron:attn:d4|ffn:e2", [4], 4),
        ("fsdp:d4|fsdp[c]:d4", [4, 4], 4),
        ("sglang:d8+d8", [8, 8], 16),
        ("vllm:d4p1t2 + d4p1t1c2", [8, 8], 16),
    ],
)
def test_accepts_areal_strings(text: str, worlds: list[int], gpus: int) -> None:
    allocation = parse_allocation(text)

    assert [part.world for part in allocation.parts] == worlds
    assert allocation.gpus == gpus


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("", 0, "expected a backend"),
        ("sglang.d4", 6, "expected `:`"),
        ("(name)", 0, "expected a backend"),
        ("sglang:d4c2", 9, "no dimension 'c'"),
        ("vllm:e2", 5, "no dimension 'e'"),
        ("sglang:d0", 8, "expected a size of 'd'"),
        ("sglang:d04", 8, "expected a size of 'd'"),
        ("sglang:d", 8, "found the end"),
        ("sglang:", 7, "found the end"),
        ("sglang", 6, "found the end"),
        ("+eval", 0, "expected a backend"),
        ("d4t2", 0, "dimensions need a backend"),
        ("fsdp:d4+d4", 8, "dimensions need a backend"),
        ("sglang[r]:d1+d4+fsdp[a]:d1", 13, "must all be named"),
        ("sglang:d4+d4|fsdp[a]:d2", 13, "equal world sizes"),
        ("sglang:d4+d4d2", 12, "given twice"),
        ("fsd:d4", 0, "did you mean 'fsdp'"),
        ("fsdp:d4d2", 7, "given twice"),
        ("fsdp:d2p2", 7, "cannot split by 'p'"),
        ("fsdp:e2", 5, "cannot split by 'e'"),
        ("sglang:d4+", 10, "found the end"),
        ("fsdp:d4 fsdp:d2", 8, "no dimension 'f'"),
        ("fsdp[]:d4", 5, "expected a name"),
        ("fsdp[1a]:d4", 5, "expected a name"),
        ("fsdp[a:d4", 6, "expected `]`"),
        ("sglang:d1+fsdp[a]:d1+fsdp[b]:d2", 0, "must all be named"),
        ("fsdp[a]:d4|fsdp:d4", 11, "needs a name"),
        ("fsdp[a]:d4|fsdp[b]:d2", 11, "equal world sizes"),
        ("fsdp[a]:d4+vllm[a]:d1", 11, "used twice"),
        ("megatron:(attn:d4|ffn:d2", 24, "expected `)`"),
        ("megatron:(attn:d4|ffn:d2)", 18, "world sizes must match"),
        ("megatron:(attn:d4|ffn:e3)", 18, "world sizes must match"),
        ("megatron:(attn:d4p2|ffn:p4)", 20, "p must match"),
        ("megatron:(attn:d4e2|ffn:d4)", 17, "no dimension 'e'"),
        ("megatron:(attn:d4|ffn:c2)", 22, "no dimension 'c'"),
        ("fsdp:(attn:d4|ffn:d4)", 5, "no attn|ffn form"),
        ("fsdp:d9999999999", 6, "expected a size"),
        ("fsdp:d\u0664", 6, "expected a size"),
        ("fsdp:d4;rm -rf", 7, "expected `+`"),
    ],
)
def test_refuses_and_points_at_the_character(text: str, position: int, words: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse_allocation(text)

    assert caught.value.position == position
    assert words in str(caught.value)


@given(st.permutations("dtpce"), st.lists(SIZES, min_size=5, max_size=5))
def test_world_is_the_product_without_e_in_any_order(order: list[str], sizes: list[int]) -> None:
    by_letter = dict(zip(order, sizes, strict=True))
    text = "megatron:" + "".join(f"{letter}{size}" for letter, size in by_letter.items())

    part = parse_allocation(text).parts[0]

    d, t, p, c = (by_letter[letter] for letter in "dtpc")
    assert part.world == d * t * p * c
    assert part.dims == by_letter


@given(st.lists(SIZES, min_size=1, max_size=6))
def test_plus_adds_and_bar_shares(sizes: list[int]) -> None:
    chain = "+".join(f"fsdp[a{n}]:d{size}|vllm[b{n}]:d{size}" for n, size in enumerate(sizes))

    allocation = parse_allocation(chain)

    assert allocation.gpus == sum(sizes)
    assert len(allocation.parts) == 2 * len(sizes)


@given(st.text(alphabet="fsdpvlmgtronc:+|[]()1209 e\n\x1bé", max_size=40))
def test_any_text_is_parsed_or_refused_inside_the_text(text: str) -> None:
    caught: AllocationError | None = None
    try:
        assert parse_allocation(text).gpus >= 1
    except AllocationError as error:
        caught = error

    assert caught is None or 0 <= caught.position <= len(text)
    assert "\x1b" not in str(caught)


# --- the grammar once more, as a generator: tokens and what they mean --------------------------
# Written from the grammar's description alone, so that it can contradict the parser.

LETTERS = {"sglang": "dtp", "vllm": "dtp", "fsdp": "dtpce", "megatron": "dtpce", "archon": "dtpce"}
SPACES = st.sampled_from(["", "", " ", "  ", "\t", "\n", " \r\n "])
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)


@dataclass(frozen=True)
class Written:
    """Tokens of a string, and (backend, name, dims, experts, world) of each of its groups."""

    tokens: list[str]
    groups: list[list[tuple[str, str | None, dict[str, int], dict[str, int], int]]]

    def with_spaces(self) -> tuple[str, list[int]]:
        """Single spaces between all tokens, and where each token begins (and the end)."""
        starts, at = [], 0
        for token in self.tokens:
            starts.append(at)
            at += len(token) + 1
        return " ".join(self.tokens), [*starts, at - 1]


def _factors(draw: st.DrawFn, world: int, letters: str) -> dict[str, int]:
    """Sizes that multiply to `world`, of letters in any order; left-out ones are 1."""
    sizes = {}
    for letter in draw(st.permutations(letters)):
        size = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
        world //= size
        sizes[letter] = size
    last = draw(st.sampled_from(list(sizes)))
    sizes[last] *= world
    kept = {letter: n for letter, n in sizes.items() if n > 1 or draw(st.booleans())}
    return kept or {last: sizes[last]}


def _cut(sizes: dict[str, int]) -> list[str]:
    return [token for letter, size in sizes.items() for token in (letter, str(size))]


def _hybrid(draw: st.DrawFn, world: int) -> tuple[list[str], dict[str, int], dict[str, int]]:
    attn = _factors(draw, world, "cdtp")
    pipeline = attn.get("p", 1)
    ffn = _factors(draw, world // pipeline, "det")
    full = {"d": 1, **ffn, "p": pipeline}
    if "d" in ffn and len(ffn) > 1 and draw(st.booleans()):
        del ffn["d"]  # derived
    if draw(st.booleans()):
        ffn["p"] = pipeline
    order = draw(st.permutations(list(ffn)))
    inner = ["attn", ":", *_cut(attn), "|", "ffn", ":", *_cut({n: ffn[n] for n in order})]
    return (["(", *inner, ")"] if draw(st.booleans()) else inner), attn, full


@st.composite
def allocations(draw: st.DrawFn, hybrids: bool = True) -> Written:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    count = sum(shape)
    names = draw(st.lists(NAMES, min_size=count, max_size=count, unique=True))
    all_named = len(shape) > 1 and count >= 3
    tokens: list[str] = []
    groups = []
    for number, members in enumerate(shape):
        world = draw(st.sampled_from([1, 2, 4, 6, 8, 12, 16, 64]))
        tokens += ["+"] if number else []
        group = []
        for member in range(members):
            name = names.pop() if all_named or member or draw(st.booleans()) else None
            backend = draw(st.sampled_from(sorted(LETTERS)))
            tokens += ["|"] if member else []
            tokens += [backend, *(["[", name, "]"] if name else []), ":"]
            if hybrids and backend in ("megatron", "archon") and draw(st.booleans()):
                cut, dims, experts = _hybrid(draw, world)
            else:
                letters = LETTERS[backend].replace("e", "")
                letters = letters.replace("p", "") if backend == "fsdp" else letters
                dims, experts = _factors(draw, world, letters), {}
                if "e" in LETTERS[backend] and draw(st.booleans()):
                    dims["e"] = 1 if backend == "fsdp" else draw(st.integers(1, 8))
                cut = _cut(dims)
            tokens += cut
            group.append((backend, name, dims, experts, world))
        groups.append(group)
    return Written(tokens, groups)


def _refused_at(text: str) -> int:
    with pytest.raises(AllocationError) as caught:
        parse_allocation(text)
    error = caught.value
    line, caret = str(error).splitlines()[1:3]
    culprit = text[error.position : error.position + 1]
    assert line[caret.index("^") :][:1] == (culprit if culprit.isprintable() else " ")
    assert re.search("valid|expected|needs? |must|use |unique", str(error)), str(error)
    return error.position


@settings(max_examples=100)
@given(allocations(), st.data())
def test_what_the_grammar_writes_is_read_exactly(written: Written, data: st.DataObject) -> None:
    text = data.draw(SPACES) + "".join(t + data.draw(SPACES) for t in written.tokens)

    allocation = parse_allocation(text)

    read = [
        [(p.backend, p.name, dict(p.dims), dict(p.experts), p.world) for p in group]
        for group in allocation.groups
    ]
    assert read == written.groups
    assert allocation.gpus == sum(group[0][-1] for group in written.groups)


@settings(max_examples=50)
@given(allocations())
def test_printing_and_reading_again_is_the_identity(written: Written) -> None:
    allocation = parse_allocation("".join(written.tokens))

    assert parse_allocation(str(allocation)) == allocation
    assert str(parse_allocation(str(allocation))) == str(allocation)


@settings(max_examples=50)
@given(allocations(), st.data())
def test_a_lost_token_is_refused_where_the_next_one_stands(
    written: Written, data: st.DataObject
) -> None:
    able = [n for n, token in enumerate(written.tokens) if token != "("]
    lost = data.draw(st.sampled_from(able))
    left = Written(written.tokens[:lost] + written.tokens[lost + 1 :], [])
    text, starts = left.with_spaces()

    assert _refused_at(text) == starts[lost]


@settings(max_examples=50)
@given(allocations(), st.data())
def test_a_doubled_token_is_refused_at_the_second(written: Written, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(written.tokens) - 1))
    tokens = [*written.tokens[: index + 1], *written.tokens[index:]]
    text, starts = Written(tokens, []).with_spaces()

    assert _refused_at(text) == starts[index + 1]


@settings(max_examples=50)
@given(allocations(), st.data())
def test_a_strange_character_is_refused_there_or_at_its_word(
    written: Written, data: st.DataObject
) -> None:
    text = "".join(written.tokens)
    at = data.draw(st.integers(0, len(text)))
    strange = data.draw(st.sampled_from("%$#!;./{}'\"\x00\x1b\u00e9\u0664\u202e\U0001f4a5"))

    position = _refused_at(text[:at] + strange + text[at:])

    assert position == at or (position < at and text[position:at].isidentifier())


@settings(max_examples=50)
@given(allocations(), st.sampled_from("xyzXDT\u03b4_"), st.data())
def test_a_wrong_letter_is_refused_there(
    written: Written, letter: str, data: st.DataObject
) -> None:
    able = [n for n, token in enumerate(written.tokens) if token in tuple("dtpce")]
    able = [n for n in able if written.tokens[n - 1] != "["]  # a name is free
    index = data.draw(st.sampled_from(able))
    tokens = [*written.tokens[:index], letter, *written.tokens[index + 1 :]]
    text, starts = Written(tokens, []).with_spaces()

    assert _refused_at(text) == starts[index]


@settings(max_examples=50)
@given(allocations(), st.sampled_from(["0", "01", "9" * 10, "9" * 5000, "-1", "\u0664"]), st.data())
def test_a_wrong_size_is_refused_there(written: Written, size: str, data: st.DataObject) -> None:
    able = [n for n, token in enumerate(written.tokens) if token.isdecimal()]
    index = data.draw(st.sampled_from(able))
    tokens = [*written.tokens[:index], size, *written.tokens[index + 1 :]]
    text, starts = Written(tokens, []).with_spaces()

    assert _refused_at(text) == starts[index]


@settings(max_examples=50)
@given(allocations(), st.data())
def test_a_dimension_given_twice_is_refused_at_the_second(
    written: Written, data: st.DataObject
) -> None:
    able = [n for n, token in enumerate(written.tokens) if token.isdecimal()]
    index = data.draw(st.sampled_from(able))
    twice = written.tokens[index - 1 : index + 1]
    tokens = [*written.tokens[: index + 1], *twice, *written.tokens[index + 1 :]]
    text, starts = Written(tokens, []).with_spaces()

    assert _refused_at(text) == starts[index + 1]


@settings(max_examples=50)
@given(allocations(hybrids=False), st.data())
def test_rules_between_parts_are_refused_at_the_part_that_breaks_them(
    written: Written, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(["world", "name", "unnamed"]))
    first, second, more = {
        "world": ("fsdp[aa__1]:d7", "|vllm[bb__1]:d14", ""),
        "name": ("fsdp[aa__1]:d7", "+vllm[aa__1]:d7", ""),
        "unnamed": ("fsdp[aa__1]:d7", "+vllm:d7", "+vllm[cc__1]:d7"),
    }[kind]
    named = all(part[1] for group in written.groups for part in group)
    before = "".join(written.tokens) + "+" if named else ""

    assert _refused_at(before + first + second + more) == len(before + first) + 1


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda b: b.decode("latin-1")))
def test_any_unicode_is_parsed_or_refused_inside_the_text(text: str) -> None:
    caught: AllocationError | None = None
    try:
        assert parse_allocation(str(parse_allocation(text))) == parse_allocation(text)
    except AllocationError as error:
        caught = error

    if caught is not None:
        assert 0 <= caught.position <= len(text)
        assert len(str(caught).splitlines()) == 4


@pytest.mark.parametrize(
    "text",
    [
        "a" * 10_000,
        "f" * 10_000 + ":d4",
        "fsdp:d4" + " " * 10_000 + "x",
        "fsdp:d" + "9" * 10_000,
        "fsdp[" + "a" * 10_000,
        "megatron:" + "(" * 10_000,
        "fsdp:" + "d1" * 5_000,
        "+".join(["fsdp:d1"] * 2_000),
        "fsdp:d1|" * 1_000,
        "\U0001f4a5" * 10_000,
        "fsdp:d4" + "\x00" * 10_000,
    ],
    ids=lambda text: text[:12].encode("ascii", "replace").decode().replace("\x00", "0"),
)
def test_a_very_long_text_is_refused_with_a_short_message(text: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse_allocation(text)

    assert 0 <= caught.value.position <= len(text)
    assert len(str(caught.value)) < 500


def test_a_very_long_allocation_is_read() -> None:
    text = "+".join(f"fsdp[n{n}]:d2|vllm[m{n}]:t2" for n in range(10_000))

    allocation = parse_allocation(text)

    assert allocation.gpus == 20_000
    assert str(allocation) == text


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("fsdp : t2 d4", "fsdp:d4t2"),
        ("megatron[m]:attn:t2d2|ffn:e4", "megatron[m]:(attn:d2t2|ffn:d1p1e4)"),
        ("sglang[r]:d2 + fsdp[a]:d4 | fsdp[c]:d4", "sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4"),
    ],
)
def test_the_printed_form_has_one_order_and_no_spaces(text: str, printed: str) -> None:
    assert str(parse_allocation(text)) == printed


def test_hybrid_derives_the_experts_sizes() -> None:
    part = parse_allocation("megatron[m]:(attn:d4p2t2c2|ffn:t4e2)").parts[0]

    assert part.dims == {"d": 4, "p": 2, "t": 2, "c": 2}
    assert part.experts == {"t": 4, "e": 2, "d": 2, "p": 2}
    assert part.size("t") == 2
    assert part.size("e") == 1


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["allocation", "sglang[r]:d4t2+fsdp:d8", "--json"])

    assert code == 0
    assert json.loads(capsys.readouterr().out) == {
        "parts": [
            {"backend": "sglang", "name": "r", "dims": {"d": 4, "t": 2}, "world": 8},
            {"backend": "fsdp", "name": None, "dims": {"d": 8}, "world": 8},
        ],
        "gpus": 16,
    }


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["allocation", "fsdp[a]:d4|fsdp[c]:d4"]) == 0

    assert "GPUs 1: 4 (shared)" in capsys.readouterr().out


def test_command_exits_2_with_a_caret_under_the_character(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["allocation", "sglang:d4x2"])

    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert lines[1].index("x") == lines[2].index("^")


# Where ours differs: docs/allocation.md, "Where this differs from AReaL".
TAKEN_HERE = {
    "archon:d1p2e2",
    "sglang:d1+d1",
    "sglang:d8+d8",
    "sglang:d4+d4",
    "vllm:d32+d16",
    "sglang:d2p1t2+d2p1t1c2",
    "vllm:d4p1t2+d4p1t1c2",
}
ROWS = [
    row.split("\t")
    for row in (DATA / "foreign" / "areal_allocations.tsv").read_text().splitlines()[1:]
]


@pytest.mark.parametrize(("text", "parts", "gpus"), ROWS, ids=[row[0] for row in ROWS])
def test_every_string_of_areal_is_read_as_areal_reads_it(text: str, parts: str, gpus: str) -> None:
    if parts == "refused" and text not in TAKEN_HERE:
        with pytest.raises(AllocationError):
            parse_allocation(text)
        return

    allocation = parse_allocation(text)

    if text not in TAKEN_HERE:
        assert " ".join(map(_as_areal, allocation.parts)) == parts
        assert allocation.gpus == int(gpus)


def _as_areal(part: AllocationPart) -> str:
    experts = part.experts or {"e": part.size("e")}
    sizes = [*map(part.size, "dtpc"), experts.get("e", 1), part.experts.get("t", 1)]
    name = f"[{part.name}]" if part.name else ""
    return "/".join([f"{part.backend}{name}", *map(str, sizes)])


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("sglang:d8+d8", "sglang:d8+fsdp:d8"),
        ("vllm:d4+d2t2c2", "vllm:d4+fsdp:d2t2c2"),
        ("sglang:d4+d2p2", "sglang:d4+megatron:d2p2"),
        ("sglang:d4+d4e2", "sglang:d4+megatron:d4e2"),
    ],
)
def test_a_trainer_without_a_backend_gets_the_one_that_areal_chose(
    text: str, canonical: str
) -> None:
    assert str(parse_allocation(text)) == canonical
