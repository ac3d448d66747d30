"""`shakedown compare` from end to end: a real model in transformers, a local server in the dialect.

The server speaks vLLM's protocol and takes its numbers from the same model, so that each trap can
be planted exactly; the real engine is compared in consistency/test_factors_vllm.py.
"""

import math
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from shakedown.cli import main
from shakedown.consistency.factors.table import FactorRow, named
from shakedown.consistency.plan import ComparisonPlan
from shakedown.consistency.run import Comparison, compare
from shakedown.consistency.samples import Scored
from shakedown.consistency.score import Reference

ROWS = [
    {"messages": [{"role": "user", "content": f"{n:02d}+{n + 1:02d}="}], "answer": "1"}
    for n in range(10)
]

STALE = 0.3  # nats that a planted stale prefix cache moves every decoded token by


@dataclass
class Engine:
    """What the server does; `plant` holds the traps that are on."""

    reference: Reference
    url: str = ""
    owner: str = "vllm"
    plant: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    seen: int = 0
    told: int = 0

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, object]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "owned_by": self.owner}]}
        with self.lock:
            self.seen += 1
            if body.get("echo") and "no_echo" in self.plant:
                return 403, {"error": {"message": "no echo here"}}
            if "refuse" in self.plant or ("refuse_some" in self.plant and self.seen % 5 == 0):
                return 400, {"error": {"message": "as planted"}}
            if path == "/generate":
                return 200, self.native(body)
            if "prompt_logprobs" in body:
                return 200, self.scored(body["prompt"])
            return 200, self.generated(path, body)

    def generated(self, path: str, body: dict[str, Any]) -> object:
        if body.get("echo"):
            # The other tokenizer's ids are ours moved by one.
            moved = int("other_tokenizer" in self.plant)
            ids = [body["prompt"][0], *(i - moved for i in body["prompt"][1:])]
            return {"choices": [{"text": self.reference.tokenizer.decode(ids)}]}
        if "logprob_token_ids" in body:
            return self.next_token(body)
        prompt = self.prompt(body)
        ids, logprobs = self.sample(prompt, body["max_tokens"], body["temperature"])
        rows = self.planted(logprobs)
        chosen: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": ids}
        if path.endswith("chat/completions"):
            chosen |= {"message": {"content": "x"}}
            chosen |= {"logprobs": {"content": [{"logprob": value} for value in rows]}}
        else:
            chosen |= {"text": "x", "logprobs": {"token_logprobs": rows}}
        if "no_logprobs" in self.plant:
            chosen["logprobs"] = None
        if "no_ids" in self.plant:
            del chosen["token_ids"]
        return {"choices": [chosen], "prompt_token_ids": prompt, "usage": {}}

    def next_token(self, body: dict[str, Any]) -> object:
        """vLLM's `logprob_token_ids`; under a cache salt nothing comes from the cache."""
        (token,) = body["logprob_token_ids"]
        (value,) = self.values(body["prompt"], [token])
        cached = 0
        if "stale_cache" in self.plant and "cache_salt" not in body:
            value, cached = value - STALE, 5
        top = {f"token_id:{token}": value}
        return {
            "choices": [{"logprobs": {"top_logprobs": [top]}}],
            "usage": {"prompt_tokens_details": {"cached_tokens": cached}},
        }

    def prompt(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            text = "".join(m["content"] for m in body["messages"])
            prompt = [1, *self.reference.tokenizer(text, add_special_tokens=False)["input_ids"]]
        else:
            prompt = list(self.reference.tokenizer(body["prompt"])["input_ids"])
        if "double_bos" in self.plant:
            prompt = [1, *prompt]
        if "other_template" in self.plant:
            prompt = [*prompt, *prompt[-2:]]
        if "other_tokenizer" in self.plant:
            prompt = [prompt[0], *(i + 1 for i in prompt[1:])]
        return prompt

    def planted(self, logprobs: list[float]) -> list[float | None]:
        rows: list[float | None] = list(logprobs)
        if "missing" in self.plant:
            rows[0] = None
        if "impossible" in self.plant:
            rows[1:4] = [0.7, math.nan, -math.inf]
        if "all_above" in self.plant:
            rows = [0.7] * len(rows)
        return rows

    def native(self, body: dict[str, Any]) -> object:
        """SGLang's /generate: [logprob, token id, text] a token."""
        ids = body["input_ids"]
        options = body["sampling_params"]
        if "logprob_start_len" in body:
            known = self.values(ids[:1], ids[1:])
            rows = [[v, i, None] for v, i in zip([None, *known], ids, strict=True)]
            return {
                "text": "",
                "meta_info": {"input_token_logprobs": rows, "output_token_logprobs": []},
            }
        made, values = self.sample(ids, options["max_new_tokens"], options["temperature"])
        rows = [[v, i, None] for v, i in zip(values, made, strict=True)]
        return {"text": "x", "meta_info": {"output_token_logprobs": rows, "finish_reason": None}}

    def scored(self, ids: Sequence[int]) -> object:
        values = self.values(ids[:1], ids[1:])
        if "updated_later" in self.plant and self.seen > 3 * len(ROWS):
            values = [value - 0.5 for value in values]
        if "wavers" in self.plant:
            values = self.waver(values)
        rows = [None, *({str(i): {"logprob": v}} for i, v in zip(ids[1:], values, strict=True))]
        return {"choices": [{"prompt_logprobs": rows}]}

    def waver(self, values: list[float]) -> list[float]:
        """Another answer each time, by a thousandth of a nat."""
        self.told += 1
        return list(values + np.random.default_rng(self.told).normal(0, 1e-3, len(values)))

    def values(
        self, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1
    ) -> list[float]:
        (score,) = self.reference.score([Scored(prompt, ids)], temperature=temperature)
        chosen = score.logprobs if "processed" in self.plant else score.raw
        return [float(value) for value in chosen]

    def sample(
        self, prompt: Sequence[int], count: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        """Draw `count` tokens, the most likely ones at temperature 0."""
        ids: list[int] = []
        generator = np.random.default_rng([len(prompt), *prompt])
        for _ in range(count):
            logits = self.logits([*prompt, *ids])
            if temperature == 0:
                place = 1 if "wrong_greedy" in self.plant and len(ids) == 2 else 0
                ids.append(int(np.argsort(-logits)[place]))
            else:
                p = np.exp(logits / temperature - np.max(logits / temperature))
                ids.append(int(generator.choice(len(p), p=p / p.sum())))
        values = self.values(prompt, ids, temperature)
        if "stale_cache" in self.plant:
            values = [value - STALE for value in values]
        if "wavers" in self.plant:
            values = self.waver(values)
        if "outlier" in self.plant and temperature and prompt[1] == prompt[2]:
            values[1] -= 5.0
        return ids, values

    def logits(self, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        with torch.inference_mode():
            out = self.reference._model(input_ids=torch.tensor([list(ids)])).logits
        return out[0, -1].double().numpy()  # type: ignore[no-any-return]


def run(engine: Engine, model: Path, data: Path, out: Path, *options: str) -> int:
    argv = ["compare", "--reference", f"transformers:{model}", "--engine", engine.url]
    argv += ["--data", str(data), "--out", str(out), "--max-tokens", "8", *options]
    return main(argv)


def compared(engine: Engine, model: Path, **options: Any) -> Comparison:
    plan = ComparisonPlan(url=engine.url, reference=str(model), rows=ROWS, max_tokens=8, **options)
    return compared_by(plan)


def compared_by(plan: ComparisonPlan) -> Comparison:
    with tempfile.TemporaryDirectory() as out:
        return compare(plan, Path(out))


def edited(source: Path, folder: Path, change: Callable[[Any], object]) -> Path:
    if source != folder:
        shutil.copytree(source, folder)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return folder


def culprit_of(result: Comparison) -> list[str]:
    """The factor that is named, if one is."""
    row = named(result.explained.rows)
    return [row.factor] if row else []


def rows_of(result: Comparison) -> dict[str, FactorRow]:
    return {row.factor: row for row in result.explained.rows}
