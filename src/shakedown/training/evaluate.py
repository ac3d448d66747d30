"""Held-out accuracy by real generation: sampled at temperature 1, and greedy."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shakedown.agents.reward_pool import RewardFailure, RewardLimits, score_rows
from shakedown.data_sources import Row
from shakedown.models import huggingface
from shakedown.models.chat import encode_answer, encode_prompt

BATCH = 256


class Evaluator:
    """Scores a plain copy of the model, on one process. The held-out rows are encoded once."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        tokenizer: Any,
        config: Any,
        reward: str,
        device: torch.device,
        limits: RewardLimits | None = None,
    ) -> None:
        self._answers = [row.answer for row in rows]
        self._prompts = [encode_prompt(tokenizer, row.messages) for row in rows]
        self._longest = max(len(encode_answer(tokenizer, row.answer)) for row in rows)
        self._tokenizer = tokenizer
        self._config = config
        self._reward, self._limits = reward, limits or RewardLimits()
        self._device = device

    def measure(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        max_tokens: int,
        seed: int,
        progress: Callable[[], None],
    ) -> dict[str, float]:
        """Mean rewards over the held-out rows; a reward that fails counts as 0 and is told.

        Args:
            weights: the whole model's.
            max_tokens: the longest answer; raised to the longest held-out answer.
            seed: of the sampling.
            progress: called after every batch of generations and every reward.

        Returns:
            `sampled_accuracy` and `greedy_accuracy`, 0..1 for rewards of that range, `samples`.

        Raises:
            UsageError: the reward cannot be used.
        """
        model = huggingface.empty_model(self._config)
        # Tied weights may be listed once: what is not given stays tied.
        model.load_state_dict(weights, strict=False)
        model.to(self._device).eval()
        budget = max(max_tokens, self._longest)
        texts: list[str] = []
        for sample in (True, False):
            # The training's random state stays as it is, and every evaluation draws alike.
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                texts += self._generate(model, sample, budget, progress)
        rewards, count = self._rewards(texts, progress), len(self._answers)
        return {
            "sampled_accuracy": sum(rewards[:count]) / count,
            "greedy_accuracy": sum(rewards[count:]) / count,
            "samples": float(count),
        }

    def _rewards(self, texts: Sequence[str], progress: Callable[[], None]) -> list[float]:
        """In a process of its own: code that never returns must not stop the trainer."""
        rows = list(zip(texts, [*self._answers, *self._answers], strict=True))
        results = asyncio.run(score_rows(self._reward, rows, self._limits, progress=progress))
        failures = [result for result in results if isinstance(result, RewardFailure)]
        if failures:
            print(
                f"held-out: {len(failures)} of {len(results)} rewards failed and count as 0; "
                f"the first: {failures[0]}",
                flush=True,
            )
        return [0.0 if isinstance(result, RewardFailure) else result for result in results]

    def _generate(
        self, model: Any, sample: bool, budget: int, progress: Callable[[], None]
    ) -> list[str]:
        texts: list[str] = []
        for start in range(0, len(self._prompts), BATCH):
            prompts = self._prompts[start : start + BATCH]
            texts += self._generate_batch(model, prompts, sample, budget)
            progress()
        return texts

    def _generate_batch(
        self, model: Any, prompts: list[list[int]], sample: bool, budget: int
    ) -> list[str]:
        tokenizer = self._tokenizer
        # Padded on the left: `generate` writes on from the last column of every row.
        padded = tokenizer.pad(
            {"input_ids": prompts}, padding=True, padding_side="left", return_tensors="pt"
        ).to(self._device)
        sampling: dict[str, Any] = {"do_sample": sample}
        # Said in full: transformers draws from the 50 likeliest tokens where `top_k` is left out.
        if sample:
            sampling |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with torch.no_grad():
            out = model.generate(
                input_ids=padded["input_ids"],
                attention_mask=padded["attention_mask"],
                max_new_tokens=budget,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **sampling,
            )
        answers = out[:, padded["input_ids"].shape[1] :]
        decoded: list[str] = tokenizer.batch_decode(answers, skip_special_tokens=True)
        return decoded
