"""Held-out accuracy by real generation: sampled at temperature 1, and greedy."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shakedown.agents.rewards import get_reward
from shakedown.training import huggingface
from shakedown.training.data import Row
from shakedown.training.data.encode import encode_answer, encode_prompt

BATCH = 256


class Evaluator:
    """Scores a plain copy of the model, on one process. The held-out rows are encoded once."""

    def __init__(
        self, rows: Sequence[Row], *, tokenizer: Any, config: Any, reward: str, device: torch.device
    ) -> None:
        self._answers = [row.answer for row in rows]
        self._prompts = [encode_prompt(tokenizer, row.messages) for row in rows]
        self._longest = max(len(encode_answer(tokenizer, row.answer)) for row in rows)
        self._tokenizer = tokenizer
        self._config = config
        self._reward = get_reward(reward)
        self._device = device

    def measure(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        max_tokens: int,
        seed: int,
        progress: Callable[[], None],
    ) -> dict[str, float]:
        """Mean rewards over the held-out rows.

        Args:
            weights: the whole model's.
            max_tokens: the longest answer; raised to the longest held-out answer.
            seed: of the sampling.
            progress: called after every batch of generations.

        Returns:
            `sampled_accuracy` and `greedy_accuracy`, 0..1 for rewards of that range, `samples`.
        """
        model = huggingface.empty_model(self._config)
        # Tied weights may be listed once: what is not given stays tied.
        model.load_state_dict(weights, strict=False)
        model.to(self._device).eval()
        budget = max(max_tokens, self._longest)
        scores = {}
        for name, sample in (("sampled_accuracy", True), ("greedy_accuracy", False)):
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                texts = self._generate(model, sample, budget, progress)
            pairs = zip(texts, self._answers, strict=True)
            scores[name] = sum(self._reward(t, a) for t, a in pairs) / len(texts)
        return {**scores, "samples": float(len(self._answers))}

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
        padded = tokenizer.pad(
            {"input_ids": prompts}, padding=True, padding_side="left", return_tensors="pt"
        ).to(self._device)
        sampling: dict[str, Any] = {"do_sample": sample}
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
