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
from shakedown.rollout.store import PublishedWeights
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
                await sync.apply(PublishedWeights(version, folder, f"digest {version}"), within=10)

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


def _replicated(
    folder: Path, moved: Callable[[dict[str, Any]], float], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """One update of an engine of two replicas; returns the requests that loaded weights.

    `moved`: nats by which the answer to a request differs once weights were sent.
    """
    expected = {"tokens": PROBE, "logprobs": [0.5 - token for token in PROBE[1:]]}
    (folder / "probe.json").write_text(json.dumps(expected))
    with running() as engine:

        def loads() -> list[dict[str, Any]]:
            return [body for path, body in engine.seen if path == "/update_weights_from_disk"]

        def reply(body: dict[str, Any]) -> Any:
            made = sglang_reply(body)
            for row in made["meta_info"].get("input_token_logprobs", [])[1:]:
                row[0] += moved(body) if loads() else 0.0
            return made

        async def work() -> None:
            url = f"http://127.0.0.1:{engine.server_port}"
            async with Client(get_token_engine("sglang"), url, "policy", timeout=10) as client:
                sync = WeightSync(client, PROBE, dtype="float32", replicas=2)
                await sync.begin()
                await sync.apply(PublishedWeights(1, folder, "new"), within=10)

        monkeypatch.setattr(fake_engine, "sglang_reply", reply)
        asyncio.run(work())
        return loads()


def test_replicas_that_all_answer_with_the_new_weights_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(_replicated(tmp_path, lambda _: 0.5, monkeypatch)) == 1


@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_with_the_old_weights_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replica: int
) -> None:
    with pytest.raises(WeightUpdateError, match=f"but replica {replica} of .* answers exactly as"):
        _replicated(
            tmp_path,
            lambda body: 0.0 if body["data_parallel_rank"] == replica else 0.5,
            monkeypatch,
        )


def test_a_replica_with_other_weights_than_the_trainers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WeightUpdateError, match=r"replica 1 of .* differ by 1\.5 nats"):
        _replicated(tmp_path, lambda body: 0.5 + 1.5 * body["data_parallel_rank"], monkeypatch)
