"""Score given tokens with transformers: the reference side. Imports torch; import it lazily."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
)

from shakedown.consistency.samples import EncodedPrompt, ImageIds, Message, Score
from shakedown.core.errors import BlockedError, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_GENERATED = 32  # prompts completed at once
_LOGIT_BYTES = 256 * 2**20  # float32 logits held at once


@dataclass(frozen=True)
class Scored:
    """A prompt's ids and the completion's ids that follow it; both are not empty."""

    prompt: Sequence[int]
    completion: Sequence[int]
    source: EncodedPrompt | None = None

    @property
    def images(self) -> bool:
        """Whether the prompt shows images."""
        return self.source is not None and bool(self.source.images)


class Reference:
    """A transformers model that scores tokens; loaded once, in one dtype.

    Args:
        model: a local folder or a hub name.
        dtype: `float32`, `bfloat16`, or `auto` (as the checkpoint says).

    Raises:
        UsageError: no such folder, or it holds no model.
        BlockedError: the hub's model cannot be had.
    """

    def __init__(self, model: str, *, dtype: str = "auto") -> None:
        self.name = model
        self.tokenizer: Any = _load(AutoTokenizer, model)
        vision = hasattr(_load(AutoConfig, model), "vision_config")
        kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        self._processor: Any = _load(AutoProcessor, model) if vision else None
        self._model: Any = _load(
            kind, model, dtype=DTYPES.get(dtype, "auto"), low_cpu_mem_usage=True
        ).eval()
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model.to(self.device)
        self._ends = self._own_sampling()
        self.vocabulary = int(self._model.get_input_embeddings().num_embeddings)

    @property
    def image_ids(self) -> ImageIds | None:
        """Makes ids of messages with images; None where the checkpoint sees none."""
        if getattr(self._processor, "image_processor", None) is None:
            return None
        return lambda messages, images: self._features(messages, images)["input_ids"][0].tolist()

    def _features(self, messages: Sequence[Message], images: Sequence[bytes]) -> dict[str, Any]:
        """All that the model takes of a prompt with images: ids, pixels, token types."""
        text = self._processor.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
        pictures = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        # The template writes BOS itself, as the server's does.
        made = self._processor(
            text=[text], images=[pictures], return_tensors="pt", add_special_tokens=False
        )
        return dict(made)

    def _inputs(self, prompt: EncodedPrompt, after: Sequence[int] = ()) -> dict[str, Any]:
        """The model's arguments for one prompt with images and the text tokens after it."""
        found = self._features(prompt.messages, prompt.images)
        shape = found["input_ids"].shape
        fill = {"input_ids": torch.tensor([list(after)], dtype=torch.int64)}
        for name, value in found.items():
            if value.shape == shape:
                one = torch.ones if name == "attention_mask" else torch.zeros
                more = fill.get(name, one((1, len(after)), dtype=value.dtype))
                found[name] = torch.cat([value, more], dim=1)
            dtype = self._model.dtype if value.is_floating_point() else value.dtype
            found[name] = found[name].to(self.device, dtype)
        return found

    def _score_images(self, item: Scored, temperature: float) -> Score:
        prompt = item.source or EncodedPrompt(0)
        image = getattr(self._model.config, "image_token_id", None)
        if image in item.completion:
            raise BlockedError(
                f"data row {prompt.index + 1}: the engine generated the image token {image}, "
                "which the reference cannot score without an image",
                hint="suppress it in the engine, or lower --temperature",
            )
        with torch.inference_mode():
            out = self._model(**self._inputs(prompt, item.completion), use_cache=False)
        own = out.logits[0, len(item.prompt) - 1 : -1].float().cpu()
        return _score(own, torch.tensor(list(item.completion)), temperature)

    def score(self, items: Sequence[Scored], *, temperature: float = 1.0) -> list[Score]:
        """Score every completion token, teacher-forced; temperature 0 counts as 1.

        Raises:
            BlockedError: a token id lies outside the reference's vocabulary.
        """
        self._check_vocabulary(items)
        scores: dict[int, Score] = {}
        for numbers in self._batches(items):
            batch = [items[number] for number in numbers]
            if batch[0].images:
                (number,) = numbers
                scores[number] = self._score_images(batch[0], temperature or 1.0)
                continue
            scores.update(zip(numbers, self._score_batch(batch, temperature or 1.0), strict=True))
        return [scores[number] for number in range(len(items))]

    def generate(
        self, prompts: Sequence[EncodedPrompt], *, max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """Complete each prompt, greedily at temperature 0; seeded by `seed`, else untouched.

        No top-k, top-p or penalty: as the engine is asked to.
        """
        made: list[list[int]] = []
        # The process's random state stays as it is.
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            size = 1 if any(prompt.images for prompt in prompts) else _GENERATED
            for start in range(0, len(prompts), size):
                batch = prompts[start : start + size]
                made += self._generate_batch(batch, max_tokens, temperature)
        return made

    def _generate_batch(
        self, prompts: Sequence[EncodedPrompt], max_tokens: int, temperature: float
    ) -> list[list[int]]:
        if prompts[0].images:
            inputs = self._inputs(prompts[0])
        else:
            inputs = self._padded([prompt.ids for prompt in prompts])
        width = inputs["input_ids"].shape[1]
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            # Said in full: it draws from the 50 likeliest tokens where `top_k` is left out.
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        out = self._model.generate(**inputs, max_new_tokens=max_tokens, **sampling)
        rows: list[list[int]] = out[:, width:].tolist()
        return [self._until_end(row) for row in rows]

    def _padded(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        width = max(map(len, prompts))
        # Padded in front: all rows are written on from the last column.
        tokens = torch.zeros((len(prompts), width), dtype=torch.int64)
        mask = torch.zeros((len(prompts), width), dtype=torch.int64)
        for number, prompt in enumerate(prompts):
            tokens[number, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[number, width - len(prompt) :] = 1
        return {"input_ids": tokens.to(self.device), "attention_mask": mask.to(self.device)}

    def _until_end(self, ids: list[int]) -> list[int]:
        """With the end token, as engines tell it, and without the padding after it."""
        places = [place for place, token in enumerate(ids) if token in self._ends]
        return ids[: places[0] + 1] if places else ids

    def _own_sampling(self) -> frozenset[int]:
        """Put the checkpoint's own sampling settings away; the ids that end a completion."""
        found = self._model.generation_config.eos_token_id
        if found is None:
            found = self.tokenizer.eos_token_id
        ends = [] if found is None else found if isinstance(found, list) else [found]
        pad = self.tokenizer.pad_token_id
        # transformers fills what a call leaves at its default from the checkpoint's.
        self._model.generation_config = GenerationConfig(
            eos_token_id=list(ends) or None,
            pad_token_id=pad if pad is not None else next(iter(ends), 0),
        )
        return frozenset(ends)

    def _score_batch(self, batch: Sequence[Scored], temperature: float) -> Iterator[Score]:
        rows = [[*item.prompt, *item.completion] for item in batch]
        width = max(map(len, rows))
        # Padded at the end: attention is causal, so that no token of a row sees its padding.
        tokens = torch.zeros((len(rows), width), dtype=torch.int64)
        mask = torch.zeros((len(rows), width), dtype=torch.int64)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        with torch.inference_mode():
            output = self._model(
                input_ids=tokens.to(self.device),
                attention_mask=mask.to(self.device),
                use_cache=False,
            )
        for item, row, logits in zip(batch, rows, output.logits, strict=True):
            # The logits at a place are those of the token after it.
            own = logits[len(item.prompt) - 1 : len(row) - 1].float().cpu()
            yield _score(own, torch.tensor(list(item.completion)), temperature)

    def _batches(self, items: Sequence[Scored]) -> Iterator[list[int]]:
        """Numbers of items by length, so that padding is small and the logits fit."""
        room = max(1, _LOGIT_BYTES // (4 * self.vocabulary))
        batch: list[int] = []
        for number in sorted(range(len(items)), key=lambda i: _length(items[i])):
            if items[number].images:  # one at a time: pixels of few images are held at once
                yield [number]
                continue
            if batch and (len(batch) + 1) * _length(items[number]) > room:
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _check_vocabulary(self, items: Sequence[Scored]) -> None:
        largest = max((max(*i.prompt, *i.completion) for i in items), default=0)
        if largest >= self.vocabulary:
            raise BlockedError(
                f"token id {largest} is outside the reference's vocabulary of {self.vocabulary}: "
                f"the engine serves another model than {self.name}",
                hint="give both sides the same checkpoint",
            )


def _score(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> Score:
    """Logits [T, V] in float32 and the tokens that follow, [T]."""
    raw = logits.log_softmax(-1)
    scaled = raw if temperature == 1.0 else (logits / temperature).log_softmax(-1)
    top = raw.topk(2, dim=-1)
    return Score(
        logprobs=scaled.gather(1, tokens[:, None])[:, 0].double().numpy(),
        raw=raw.gather(1, tokens[:, None])[:, 0].double().numpy(),
        top_ids=top.indices[:, 0].numpy(),
        margins=(top.values[:, 0] - top.values[:, 1]).double().numpy(),
    )


def _length(item: Scored) -> int:
    return len(item.prompt) + len(item.completion)


def _load(kind: Any, model: str, **options: Any) -> Any:
    looks_local = model.startswith((".", "/")) or model.count("/") > 1
    path = Path(model)
    if looks_local and not (path / "config.json").is_file():
        raise UsageError(
            f"reference model {model}: no such folder, or no config.json in it",
            hint="give a Hugging Face checkpoint folder or a hub name",
        )
    try:
        return kind.from_pretrained(str(path) if looks_local else model, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise BlockedError(
            f"cannot load {model}: {' '.join(str(error).split())[:300]}",
            hint="check the name, the files and the network",
        ) from error
