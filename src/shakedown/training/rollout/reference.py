"""What published weights must answer, by transformers: for models small enough to load at once."""

from collections.abc import Sequence
from pathlib import Path

LARGEST = 4 << 30  # bytes of weights


def reference_logprobs(folder: Path, tokens: Sequence[int]) -> list[float] | None:
    """Logprobs of `tokens[1:]` in float32 on the CPU, or None for a model that is too large.

    Raises:
        UsageError: the folder holds no model that transformers reads.
    """
    if sum(path.stat().st_size for path in folder.glob("*.safetensors")) > LARGEST:
        return None
    import torch

    from shakedown.training import huggingface

    huggingface.quiet()
    model = huggingface.read_model(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(tokens)])).logits[0, :-1].float()
    chosen = torch.tensor(list(tokens[1:]))[:, None]
    found: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
    return found
