"""Which samples are scored again, and what a server's log says."""

from pathlib import Path

import numpy as np
import pytest

from shakedown.consistency.factors.bench import chosen
from shakedown.consistency.factors.reference_side import _backend
from shakedown.consistency.factors.weights import digest
from shakedown.consistency.part import ComparedSample
from shakedown.consistency.samples import ComparedCompletion, EncodedPrompt, Score


def sample(number: int, *, tokens: int = 10, gap: float = 0.0) -> ComparedSample:
    zeros = np.zeros(tokens)
    prompt = EncodedPrompt(number, ids=[1] * 10)
    completion = ComparedCompletion(prompt, [3] * tokens, zeros - gap)
    return ComparedSample(completion, Score(zeros, zeros, np.zeros(tokens, np.int64), zeros))


def numbers(samples: list[ComparedSample]) -> list[int]:
    return [each.completion.prompt.index for each in samples]


def test_few_samples_are_all_scored_again() -> None:
    assert numbers(chosen([sample(n) for n in range(20)])) == list(range(20))
    assert chosen([]) == []


def test_of_many_those_with_the_largest_differences_and_others_evenly() -> None:
    found = numbers(chosen([sample(n, gap=float(n in (501, 777))) for n in range(1000)]))
    assert {501, 777} < set(found)
    assert 60 <= len(found) <= 64
    assert (found[0], found[-1]) == (0, 999)
    steps = np.diff([n for n in found if n not in (501, 777)])
    assert steps[4:].min() >= 15  # the first are the other two "worst", which do not differ


def test_long_samples_are_fewer_and_of_too_long_ones_the_shortest_stands_for_all() -> None:
    found = chosen([sample(n, tokens=990) for n in range(50)])
    assert len(found) == 4  # of 1000 tokens each, of 4096 at most
    lengths = (9000, 8000, 9000)
    assert numbers(chosen([sample(n, tokens=size) for n, size in enumerate(lengths)])) == [1]
    mixed = [sample(0, tokens=9000, gap=1.0), *(sample(n) for n in range(1, 9))]
    assert numbers(chosen(mixed)) == list(range(1, 9))


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        (
            b"INFO cuda.py:507] Using FLASH_ATTN attention backend out of potential: [..]",
            "FLASH_ATTN",
        ),
        (b"INFO Using CPU worker", ""),
        (b"Using " + b"A" * 50 + b" attention backend", ""),
    ],
)
def test_the_attention_backend_is_read_from_the_log(
    tmp_path: Path, line: bytes, backend: str
) -> None:
    (tmp_path / "log").write_bytes(b"\xff begin\n" + line + b"\n")
    assert _backend(tmp_path / "log") == backend
    assert _backend(tmp_path / "none") == ""


def test_a_digest_follows_the_content_of_the_weights_alone(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"one")
    first = digest(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert digest(tmp_path) == first
    (tmp_path / "a.safetensors").write_bytes(b"two")
    assert digest(tmp_path) != first
