"""The reference side: score given tokens with transformers. Imports torch; import it lazily."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)

from shakedown.consistency.plan import check_reference
from shakedown.consistency.samples import EncodedPrompt, ImageIds, Score, Scored
from shakedown.consistency.vision import Vision, completion_logits
from shakedown.core.errors import CannotJudgeError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_GENERATED = 1 << 15  # tokens of prompts completed at once, including padding and answers
_SCORED = 1 << 12  # tokens scored at once, including padding; fewer if their logits
_LOGIT_BYTES = 256 * 2**20  # in float32 would take more than this


class Reference:
    """A transformers model that scores tokens; loaded once, in one dtype.

    Args:
        model: a local folder or a hub name.
        dtype: `float32`, `bfloat16`, or `auto` (as the checkpoint says).
        config: a transformers config that replaces the checkpoint's own.

    Raises:
        UsageError: no such folder, it lacks files, or its sizes differ from its weights'.
        CannotJudgeError: the hub's model is not available.
    """

    def __init__(self, model: str, *, dtype: str = "auto", config: Any = None) -> None:
        self.name = model
        if config is None:
            check_reference(model)
        self.tokenizer: Any = _load(AutoTokenizer, model)
        config = config if config is not None else _load(AutoConfig, model)
        # Some checkpoints with vision have a text-only class (Phi-4 multimodal).
        sees = hasattr(config, "vision_config") and (
            type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        )
        self._vision = Vision(model) if sees else None
        kind = AutoModelForImageTextToText if self._vision else AutoModelForCausalLM
        options = {"dtype": DTYPES.get(dtype, "auto"), "low_cpu_mem_usage": True}
        self._model: Any = _load(kind, model, config=config, **options).eval()
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model.to(self.device)
        self._ends = self._own_sampling()
        self.vocabulary = int(self._model.get_input_embeddings().num_embeddings)

    @property
    def attention(self) -> str:
        """transformers' name of the attention in use, such as `sdpa`."""
        return str(self._model.config._attn_implementation)

    @property
    def image_ids(self) -> ImageIds | None:
        """The processor for messages with images; None if the checkpoint takes none."""
        return self._vision.ids if self._vision else None

    @property
    def experts(self) -> bool:
        """Whether the model is a mixture of experts, by the usual config keys."""
        text = self._model.config.get_text_config()
        counts = [getattr(text, name, None) for name in _EXPERTS]
        return any(isinstance(count, int) and count > 1 for count in counts)

    @contextlib.contextmanager
    def attending(self, attention: str) -> Iterator[None]:
        """Use another attention until the block ends.

        Raises:
            CannotJudgeError: the model does not have it.
        """
        own = self.attention
        try:
            self._model.set_attn_implementation(attention)
        except (ValueError, ImportError) as error:
            raise CannotJudgeError(f"the model has no {attention} attention: {error}") from error
        try:
            yield
        finally:
            self._model.set_attn_implementation(own)

    @contextlib.contextmanager
    def images_as_text(self) -> Iterator[None]:
        """Let image tokens see only earlier tokens, until the block ends.

        Gemma 3 lets the tokens of one image see each other; `token_type_ids` marks them.
        """
        if self._vision is None:
            raise CannotJudgeError(f"{self.name} takes no images")
        self._vision.causal = True
        try:
            yield
        finally:
            self._vision.causal = False

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters by name, in the order of the forward pass; tied ones under each name."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    @contextlib.contextmanager
    def computing_with(self, parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[None]:
        """Use these parameters instead of its own until the block ends; nothing is copied."""
        own = self.parameters()
        try:
            self._put(parameters)
            yield
        finally:
            self._put({name: own[name] for name in parameters})

    def _put(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            parent, _, leaf = name.rpartition(".")
            setattr(self._model.get_submodule(parent), leaf, parameter)

    def score(self, items: Sequence[Scored], *, temperature: float = 1.0) -> list[Score]:
        """Score every completion token, teacher-forced; temperature 0 counts as 1.

        Raises:
            CannotJudgeError: a token id is outside the reference's vocabulary.
        """
        self._check_vocabulary(items)
        scores: dict[int, Score] = {}
        for numbers in self._fitting(items):
            batch = [items[number] for number in numbers]
            one = self._score_batch if not batch[0].images else self._score_with_images
            scores.update(zip(numbers, one(batch, temperature or 1.0), strict=True))
        return [scores[number] for number in range(len(items))]

    def score_packed(self, items: Sequence[Scored], *, temperature: float = 1.0) -> list[Score]:
        """As `score`, with the sequences of a batch packed into one row.

        transformers separates them by their position ids, which start at 0 in each.
        """
        self._check_vocabulary(items)
        scores: dict[int, Score] = {}
        for numbers in self._fitting(items):
            batch = [items[number] for number in numbers]
            scores.update(zip(numbers, self._score_row(batch, temperature or 1.0), strict=True))
        return [scores[number] for number in range(len(items))]

    def generate(
        self, prompts: Sequence[EncodedPrompt], *, max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """Complete each prompt, greedily at temperature 0; the sampling is seeded by `seed`.

        Without top-k, top-p or penalties, as requested from the engine.
        """
        made: dict[int, list[int]] = {}
        lengths = [len(prompt.ids) + max_tokens for prompt in prompts]
        # The process's random state is not changed.
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            for numbers in _batches(prompts, lengths, _GENERATED):
                inputs = self._prompt_inputs([prompts[number] for number in numbers])
                found = self._generate_batch(inputs, max_tokens, temperature)
                made.update(zip(numbers, found, strict=True))
        return [made[number] for number in range(len(prompts))]

    def _prompt_inputs(self, prompts: Sequence[EncodedPrompt]) -> dict[str, torch.Tensor]:
        """The model's arguments for prompts of text, or for one with images."""
        if self._vision and prompts[0].images:
            return self._vision.inputs(prompts[0], self._model)
        width = max(len(prompt.ids) for prompt in prompts)
        # Padded on the left, so that all rows continue from the last column.
        tokens = torch.zeros((len(prompts), width), dtype=torch.int64)
        mask = torch.zeros((len(prompts), width), dtype=torch.int64)
        for number, prompt in enumerate(prompts):
            tokens[number, width - len(prompt.ids) :] = torch.tensor(list(prompt.ids))
            mask[number, width - len(prompt.ids) :] = 1
        return {"input_ids": tokens.to(self.device), "attention_mask": mask.to(self.device)}

    def _generate_batch(
        self, inputs: dict[str, torch.Tensor], max_tokens: int, temperature: float
    ) -> list[list[int]]:
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            # Explicit, because without `top_k` it draws from the 50 likeliest tokens.
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        out = self._model.generate(**inputs, max_new_tokens=max_tokens, **sampling)
        rows: list[list[int]] = out[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._until_end(row) for row in rows]

    def _until_end(self, ids: list[int]) -> list[int]:
        """The completion with the end token, as engines report it, and without padding."""
        places = [place for place, token in enumerate(ids) if token in self._ends]
        return ids[: places[0] + 1] if places else ids

    def _own_sampling(self) -> frozenset[int]:
        """Drop the checkpoint's own sampling settings; returns the ids that end a completion."""
        found = self._model.generation_config.eos_token_id
        if found is None:
            found = self.tokenizer.eos_token_id
        ends = [] if found is None else found if isinstance(found, list) else [found]
        pad = self.tokenizer.pad_token_id
        # transformers fills defaults of a call from the checkpoint's.
        self._model.generation_config = GenerationConfig(
            eos_token_id=list(ends) or None,
            pad_token_id=pad if pad is not None else next(iter(ends), 0),
        )
        return frozenset(ends)

    def _score_batch(self, batch: Sequence[Scored], temperature: float) -> Iterator[Score]:
        rows = [[*item.prompt, *item.completion] for item in batch]
        width = max(map(len, rows))
        # Padded on the right: attention is causal, so no token sees the padding.
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
            # The logits at a position predict the token after it.
            own = logits[len(item.prompt) - 1 : len(row) - 1].float().cpu()
            yield _score(own, torch.tensor(list(item.completion)), temperature)

    def _score_with_images(self, batch: Sequence[Scored], temperature: float) -> Iterator[Score]:
        for item in batch:
            if self._vision is None or item.source is None:
                raise CannotJudgeError(f"{self.name} takes no images")
            inputs = self._vision.inputs(item.source, self._model)
            with torch.inference_mode():
                logits = completion_logits(self._model, inputs, item.completion)
            yield _score(logits.float().cpu(), torch.tensor(list(item.completion)), temperature)

    def _score_row(self, batch: Sequence[Scored], temperature: float) -> Iterator[Score]:
        rows = [[*item.prompt, *item.completion] for item in batch]
        tokens = torch.tensor([list(itertools.chain(*rows))])
        places = torch.cat([torch.arange(len(row)) for row in rows])[None]
        with torch.inference_mode():
            output = self._model(
                input_ids=tokens.to(self.device),
                position_ids=places.to(self.device),
                use_cache=False,
            )
        end = 0
        for item, row in zip(batch, rows, strict=True):
            end += len(row)
            own = output.logits[0, end - len(item.completion) - 1 : end - 1].float().cpu()
            yield _score(own, torch.tensor(list(item.completion)), temperature)

    def _fitting(self, items: Sequence[Scored]) -> Iterator[list[int]]:
        room = max(1, min(_SCORED, _LOGIT_BYTES // (4 * self.vocabulary)))
        return _batches(items, [_length(item) for item in items], room)

    def _check_vocabulary(self, items: Sequence[Scored]) -> None:
        largest = max((max(*i.prompt, *i.completion) for i in items), default=0)
        if largest >= self.vocabulary:
            raise CannotJudgeError(
                f"token id {largest} is outside the reference's vocabulary of {self.vocabulary}: "
                f"the engine serves another model than {self.name}",
                hint="use the same checkpoint on both sides",
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


def _batches(
    items: Sequence[EncodedPrompt | Scored], lengths: Sequence[int], room: int
) -> Iterator[list[int]]:
    """Batches of item numbers by length, with little padding and at most `room` tokens.

    An item with images is its own batch, so that few images are in memory at once.
    """
    batch: list[int] = []
    for number in sorted(range(len(items)), key=lengths.__getitem__):
        if items[number].images:
            yield [number]
            continue
        if batch and (len(batch) + 1) * lengths[number] > room:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _length(item: Scored) -> int:
    return len(item.prompt) + len(item.completion)


def _load(kind: Any, model: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(model, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise CannotJudgeError(
            f"cannot load {model}: {' '.join(str(error).split())[:300]}",
            hint="check the name, the files and the network",
        ) from error
