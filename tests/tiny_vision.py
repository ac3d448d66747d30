"""A tiny Gemma 3 with vision and random weights, and drawn images whose items are to be counted."""

import base64
import io
import random
from pathlib import Path
from typing import Any

from shakedown.core.folders import staged_folder

_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
_IMAGE = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
_LINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")  # vLLM looks these up by name
_SIZE, _PATCH, _SOFT = 64, 8, 16  # pixels, pixels, tokens an image
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def write_vision_model(folder: Path, *, seed: int) -> None:
    """Write the model as a Hugging Face folder.

    Raises:
        StorageError: the folder cannot be written.
    """
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = _tokenizer()
    pictures = Gemma3ImageProcessorPil(size={"height": _SIZE, "width": _SIZE})
    with staged_folder(folder) as staged:
        model = _model(seed)
        model.save_pretrained(staged)
        _save_weights(model, staged / "model.safetensors")
        Gemma3Processor(
            pictures, tokenizer, chat_template=_TEMPLATE, image_seq_length=_SOFT
        ).save_pretrained(staged)


def _save_weights(model: Any, path: Path) -> None:
    """Under the names of published checkpoints, which vLLM reads; transformers 5 leaves parts out.

    Output weights are tied to the embeddings, and so are not written.
    """
    from safetensors.torch import save_file

    weights = {}
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            short = name.removeprefix("model.").replace("language_model.", "language_model.model.")
            short = short.replace("vision_tower.", "vision_tower.vision_model.")
            weights[short] = value.contiguous()
    save_file(weights, path, metadata={"format": "pt"})


def counting_rows(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Rows of one image (PNG in a data URI, 96 x 96) with 1 to 6 items, and their number."""
    return [_row(random.Random(f"{seed} {number}")) for number in range(count)]


def _row(draw: random.Random) -> dict[str, Any]:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (96, 96), (200, 200, 200))
    pen, items = ImageDraw.Draw(image), draw.randint(1, 6)
    for place in draw.sample(range(9), items):
        x, y = 32 * (place % 3) + 6, 32 * (place // 3) + 6
        shape = draw.choice((pen.ellipse, pen.rectangle))
        shape((x, y, x + 20, y + 20), fill=draw.choice(("red", "green", "blue", "black")))
    out = io.BytesIO()
    image.save(out, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    parts = [
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "text", "text": "How many items are there? Answer in [ ]."},
    ]
    return {"messages": [{"role": "user", "content": parts}], "answer": str(items)}


def _vocabulary() -> dict[str, int]:
    characters = [chr(code) for code in range(32, 127)]
    return {t: i for i, t in enumerate([*_TOKENS, *_IMAGE, *_LINES, *characters])}


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(_vocabulary(), unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n{1,4}|[^\n]"), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<start_of_turn>", "<end_of_turn>"],
        extra_special_tokens=dict(
            zip(("boi_token", "eoi_token", "image_token"), _IMAGE, strict=True)
        ),
        model_max_length=1024,
    )


def _model(seed: int) -> Any:
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    ids = _vocabulary()
    text = {
        "vocab_size": len(ids), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "query_pre_attn_scalar": 32, "max_position_embeddings": 1024,
        "sliding_window": 512, "initializer_range": 0.05,
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": _SIZE, "patch_size": _PATCH,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=_SOFT,
        boi_token_index=ids[_IMAGE[0]],
        eoi_token_index=ids[_IMAGE[1]],
        image_token_index=ids[_IMAGE[2]],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Gemma3ForConditionalGeneration(config)
        # transformers begins with zeros here: every image would look the same to the text.
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
        return model
