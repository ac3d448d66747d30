"""Whether a server has new weights, told by its answers to a probe."""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shakedown.inference.client import Client
from shakedown.inference.engines import get_token_engine
from shakedown.rollout.store import Weights
from shakedown.rollout.weights import WeightSync, WeightUpdateError
from tests.faults import fake_engine
from tests.faults.fake_engine import sglang_reply
from tests.unit.local_engine import running

PROBE = [5, 6, 7, 8]


def _update(folder: Path, shift: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions for an engine whose logprobs are moved by `shift` nats in its n-th answer."""
    answers = itertools.count()

    def reply(body: dict[str, Any]) -> Any:
        made = sglang_reply(body)
        moved = shift(next(answers)) if "input_token_logprobs" in made["meta_info"] else 0.0
        for row in made["meta_info"].get("input_token_logprobs", [])[1:]:
            row[0] += moved
        return made

    monkeypatch.setattr(fake_engine, "sglang_reply", reply)
    expected = {"tokens": PROBE, "logprobs": [-float(token) for token in PROBE[1:]]}
    (folder / "probe.json").write_text(json.dumps(expected))

    async def work(url: str) -> None:
        async with Client(get_token_engine("sglang"), url, "policy", timeout=10) as client:
            sync = WeightSync(client, PROBE, dtype="bfloat16")
            await sync.begin()
            for version in (1, 2):
                await sync.apply(Weights(version, folder, f"digest {version}"), within=10)

    with running() as engine:
        asyncio.run(work(f"http://127.0.0.1:{engine.server_port}"))


@pytest.mark.parametrize("first", [0.0, 0.001])
def test_a_server_that_answers_as_before_to_the_last_digit_has_ignored_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: float
) -> None:
    """Also where its second answer was not quite its first one."""
    with pytest.raises(WeightUpdateError, match="answers exactly as with the weights before it"):
        _update(tmp_path, lambda number: 0.0 if number else first, monkeypatch)


def _wavering(number: int) -> float:
    """Nats that the n-th answer is off: 0, 0.0005, 0.001, 0.00025, 0.00075, and again."""
    return number * 2 % 5 * 0.00025


def test_a_server_whose_answers_waver_is_not_silently_taken_to_have_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _update(tmp_path, _wavering, monkeypatch)

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2"]
    assert all("two with the same weights were 0.0005 apart" in line for line in lines)


def test_a_server_whose_answers_move_further_than_they_waver_has_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _update(tmp_path, lambda number: _wavering(number) + number // 2 * 0.03, monkeypatch)

    assert capsys.readouterr().out == ""
