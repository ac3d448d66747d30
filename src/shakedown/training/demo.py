"""The demo: a tiny Qwen3 checkpoint with random weights, and two-digit addition as JSON lines."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shakedown.core.errors import ConfigError
from shakedown.core.files import write_text
from shakedown.core.folders import staged_folder

SPECIALS = ("<pad>", "<bos>", "<eos>")
# All of printable ASCII, so that any English prompt has a token for each character.
CHARACTERS = "0123456789+=\n " + "".join(
    chr(code) for code in range(33, 127) if chr(code) not in "0123456789+="
)
UNKNOWN = "?"
# Chat and completion prompts agree: both are <bos> and the plain text.
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"

PAIRS = 100 * 100
MAX_POSITIONS = 1024
# 0.6M parameters: SFT and then GRPO learn two-digit addition in about half a minute each on one
# core (measured, one seed). The keys are those of a Qwen3's config.json.
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
}


def write_model(folder: Path, *, seed: int) -> None:
    """Write the tiny model (0.6M parameters, seeded random weights) as a Hugging Face folder.

    Raises:
        StorageError: the folder cannot be written.
    """
    from shakedown.models.huggingface import quiet

    quiet()
    with staged_folder(folder) as staged:
        _build_model(seed).save_pretrained(staged)
        _build_tokenizer().save_pretrained(staged)


def addition_rows(*, train_size: int, heldout_size: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Disjoint train and held-out problems: `12+34=` -> `640`, the sum's digits reversed.

    Raises:
        ConfigError: more problems are asked for than the 10,000 that exist.
    """
    if train_size + heldout_size > PAIRS:
        raise ConfigError(
            f"data.train_size + data.heldout_size = {train_size + heldout_size}, "
            f"but the demo has {PAIRS} problems in all",
            hint=f"lower data.train_size to at most {PAIRS - heldout_size}",
        )
    order = list(range(PAIRS))
    random.Random(seed).shuffle(order)
    heldout, train = order[:heldout_size], order[heldout_size : heldout_size + train_size]
    return [_row(*divmod(i, 100)) for i in train], [_row(*divmod(i, 100)) for i in heldout]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines atomically.

    Raises:
        StorageError: the file cannot be written.
    """
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _row(left: int, right: int) -> Mapping[str, Any]:
    prompt = f"{left:02d}+{right:02d}="
    # The lowest digit first: the carry then comes from what is already written, which a small model
    # learns far sooner ("Teaching Arithmetic to Small Transformers", arXiv 2307.03381).
    answer = f"{left + right:03d}"[::-1]
    return {"messages": [{"role": "user", "content": prompt}], "answer": answer}


def _build_model(seed: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(_vocabulary()),
        **MODEL,
        initializer_range=0.05,  # so small a model learns twice as fast as with the usual 0.02
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    # The caller's random state stays as it is.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def _vocabulary() -> Sequence[str]:
    return [*SPECIALS, *CHARACTERS]


def _build_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(_vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    # The empty pattern matches between any two characters, so that each becomes a word of its own.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    # Without a decoder the characters would come back with a blank between them.
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
