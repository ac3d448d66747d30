"""Allocation strings: what AReaL accepts, what it refuses, and where the caret points."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shakedown.cli import main
from shakedown.cluster.allocation import AllocationError, parse_allocation

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
