"""Prompts with images, by the checkpoint's processor. Imports torch; import it lazily."""

import functools
import io
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoProcessor

from shakedown.consistency.samples import ChatMessage, EncodedPrompt
from shakedown.core.errors import CannotJudgeError


class Vision:
    """Ids and pixels of prompts with images.

    Args:
        model: the checkpoint, a folder or a hub name; its processor is loaded on first use, so
            text-only comparisons need none.
    """

    def __init__(self, model: str) -> None:
        self._name = model
        self.causal = False  # image tokens see only earlier tokens, as text does

    def ids(self, messages: Sequence[ChatMessage], images: Sequence[bytes]) -> list[int]:
        """Token ids of messages with images (PNG), including the images' tokens.

        Raises:
            CannotJudgeError: the checkpoint has no image processor that can be loaded here.
        """
        found: list[int] = self._features(messages, images)["input_ids"][0].tolist()
        return found

    def inputs(self, prompt: EncodedPrompt, model: Any) -> dict[str, torch.Tensor]:
        """The model's arguments for one prompt, on its device and in its dtype.

        Raises:
            CannotJudgeError: as `ids`, or with `causal` the model does not mark its image tokens.
        """
        made = self._features(prompt.messages, prompt.images)
        if self.causal:
            made["token_type_ids"] = _as_text(made, model)
        return {
            name: value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
            for name, value in made.items()
        }

    def _features(
        self, messages: Sequence[ChatMessage], images: Sequence[bytes]
    ) -> dict[str, torch.Tensor]:
        from PIL import Image

        text = self._processor.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
        pictures = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        # The template writes BOS itself, as the server's does.
        made = self._processor(
            text=[text], images=[pictures], return_tensors="pt", add_special_tokens=False
        )
        return dict(made)

    @functools.cached_property
    def _processor(self) -> Any:
        try:
            found = AutoProcessor.from_pretrained(self._name)
        # A torchvision for another torch version fails with a RuntimeError.
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            raise CannotJudgeError(
                f"cannot load the processor of {self._name}: {' '.join(str(error).split())[:300]}",
                hint="this needs the checkpoint's preprocessor_config.json, and often a "
                "torchvision that matches the installed torch",
            ) from error
        if getattr(found, "image_processor", None) is None:
            raise CannotJudgeError(
                f"{self._name} has vision, but no image processor",
                hint="copy processor_config.json or preprocessor_config.json beside config.json",
            )
        return found


def _as_text(made: dict[str, torch.Tensor], model: Any) -> torch.Tensor:
    """Token types [1, P] that mark no image, for models where they let image tokens see each other.

    In Gemma 3 they are 1 for an image's tokens and 0 for text. Elsewhere they mean other things.
    """
    kinds, image = made.get("token_type_ids"), getattr(model.config, "image_token_id", None)
    if kinds is None or not torch.equal(kinds.bool(), made["input_ids"] == image):
        raise CannotJudgeError("the model does not mark its image tokens by token_type_ids")
    return torch.zeros_like(kinds)


def completion_logits(
    model: Any, inputs: dict[str, torch.Tensor], completion: Sequence[int]
) -> torch.Tensor:
    """Logits [T, vocabulary] of the T tokens of a completion, each before it is seen.

    The prompt is processed first and the completion then through the cache, as in generation: in
    one pass a sampled image token would be taken for a missing image.
    """
    first = model(**inputs, use_cache=True)
    before = first.logits[0, -1:]
    if len(completion) == 1:
        return before
    given = torch.tensor([list(completion[:-1])], device=before.device)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(given)], dim=1)
    rest = model(
        input_ids=given,
        attention_mask=mask,
        past_key_values=first.past_key_values,
        use_cache=True,
    )
    return torch.cat([before, rest.logits[0]])
