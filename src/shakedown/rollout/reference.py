"""Reference for published weights: their tensors and log-probabilities, without the server."""

import threading
from collections.abc import Sequence
from pathlib import Path

# Bytes of weights: they are read whole, in float32, into the memory of the orchestrator's node.
LARGEST = 4 << 30
# transformers cannot load in two threads at once: it then misses tied weights (seen in 5.19).
_LOADING = threading.Lock()


def reference_logprobs(folder: Path, tokens: Sequence[int]) -> list[float] | None:
    """Logprobs of `tokens[1:]` in float32 on the CPU, or None for a model that is too large.

    Raises:
        UsageError: the folder holds no model that transformers reads.
    """
    if sum(path.stat().st_size for path in folder.glob("*.safetensors")) > LARGEST:
        return None
    import torch

    from shakedown.models import huggingface

    huggingface.quiet()
    with _LOADING:
        model = huggingface.read_model(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(tokens)])).logits[0, :-1].float()
    chosen = torch.tensor(list(tokens[1:]))[:, None]
    found: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
    return found


def same_weights(one: Path, other: Path) -> bool:
    """Whether two folders hold equal tensors, whatever their files look like.

    Reads until the first difference, which after an update is the first tensor. Names that only
    one folder has are left out: tied weights are written once or twice.
    """
    from safetensors import safe_open

    folders = [_tensor_files(folder) for folder in (one, other)]
    shared = sorted(folders[0].keys() & folders[1].keys())
    for name in shared:
        tensors = []
        for files in folders:
            with safe_open(files[name], framework="pt") as archive:
                tensors.append(archive.get_tensor(name))
        # Cast: the input model's folder may be in another dtype than the trainer exports.
        if tensors[0].shape != tensors[1].shape or not tensors[0].equal(
            tensors[1].to(tensors[0].dtype)
        ):
            return False
    return bool(shared)


def _tensor_files(folder: Path) -> dict[str, Path]:
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as archive:
            found |= dict.fromkeys(archive.keys(), path)
    return found
