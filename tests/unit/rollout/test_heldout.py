"""When held-out rows are measured, the figures' intervals, and the answers of a server."""

import asyncio
from typing import Any

import pytest

from shakedown.config import StageConfig
from shakedown.core.errors import ServerError
from shakedown.inference.engines import Completion
from shakedown.rollout.groups import Prompt
from shakedown.rollout.heldout import HeldOut, ServerEvaluation, accuracy, due, figures


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [0, 10]),
        ({"eval_every": 4}, [0, 4, 8, 10]),
        ({"eval_every": 5}, [0, 5, 10]),
        ({"eval_every": 99}, [0, 10]),
        ({"eval_every": 1, "eval_samples": 0}, []),
    ],
)
def test_the_first_the_last_and_every_so_many_steps_are_measured(
    settings: dict[str, int], steps: list[int]
) -> None:
    stage = {"algorithm": "sft", "allocation": "fsdp:d1", "steps": 10, "batch_size": 1}
    config = StageConfig.model_validate({**stage, "optimizer": {"lr": 0.1}, **settings})

    assert [step for step in range(11) if due(step, config)] == steps


def test_rewards_of_0_and_1_have_wilsons_interval_and_others_the_bootstraps() -> None:
    # Wilson's interval of 81 of 263: Newcombe, Statistics in Medicine 17 (1998), table I.
    share = accuracy([1.0] * 81 + [0.0] * 182)
    partial = accuracy([0.1, 0.9] * 200)

    assert (share.low, share.high) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    # The normal interval of a mean of 400 with standard deviation 0.4.
    assert (partial.value, partial.low, partial.high) == pytest.approx(
        (0.5, 0.461, 0.539), abs=5e-3
    )
    assert accuracy([0.0] * 20).high > 0.1  # nothing right of a few is no proof of nothing


def test_figures_name_both_ways_to_answer() -> None:
    found = figures([0.0, 1.0], [1.0, 1.0])

    assert (found["sampled_accuracy"], found["greedy_accuracy"], found["samples"]) == (
        0.5,
        1.0,
        2.0,
    )
    assert found["greedy_accuracy_low"] < 1.0 == found["greedy_accuracy_high"]


class Numbers:
    """Writes tokens as text."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))


class Server:
    """Answers the prompt's first token again: greedy always, sampled only when it is even."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []

    async def room(self) -> int | None:
        return 10

    async def generate(
        self, prompt: list[int], *, max_tokens: int, temperature: float
    ) -> list[Completion]:
        self.asked.append((max_tokens, temperature))
        if prompt[0] == 13:
            raise ServerError("unlucky")
        token = prompt[0] if not temperature or prompt[0] % 2 == 0 else 0
        return [Completion([token], [-0.5], "", "stop")]


def _measure(server: Server, *prompts: Prompt) -> dict[str, float]:
    held_out = HeldOut(prompts, max_tokens=5)
    evaluation = ServerEvaluation(server, Numbers(), held_out, "exact_match")  # type: ignore[arg-type]
    found = asyncio.run(evaluation.measure())
    assert evaluation.progress >= 2 * len(prompts)
    return found


def test_a_server_answers_each_row_twice_within_its_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Server()

    found = _measure(server, Prompt([2], "2"), Prompt([3], "3"), Prompt([4] * 8, "4"))

    assert found["sampled_accuracy"] == pytest.approx(2 / 3)
    assert found["greedy_accuracy"] == 1.0
    assert sorted(server.asked) == [(2, 0.0), (2, 1.0), (5, 0.0), (5, 0.0), (5, 1.0), (5, 1.0)]
    assert capsys.readouterr().out == ""


def test_rows_without_an_answer_count_as_0_and_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = _measure(Server(), Prompt([2], "2"), Prompt([13], "13"), Prompt([4] * 10, "4"))

    assert found["greedy_accuracy"] == pytest.approx(1 / 3)
    said = capsys.readouterr().out
    assert "held-out: 4 of 6 rows have no answer and count as 0; the first: unlucky" in said


def test_a_server_that_answers_nothing_is_an_error() -> None:
    with pytest.raises(ServerError, match="unlucky"):
        _measure(Server(), Prompt([13], "13"))
