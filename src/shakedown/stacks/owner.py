"""The owner of a source file: the user, an installed library, Python itself, or this package."""

import re
import sys
from functools import lru_cache
from typing import Literal

Owner = Literal["user", "library", "standard", "ours"]

# py-spy shortens `.../site-packages/torch/nn/x.py` to `torch/nn/x.py`, where only the top folder
# tells a library from the user's code.
_LIBRARIES = frozenset(
    """torch torchvision torchaudio torchdata transformers accelerate deepspeed megatron numpy
    datasets vllm sglang ray trl peft lightning pytorch_lightning triton httpx httpcore openai
    anyio uvicorn fastapi starlette tqdm wandb safetensors huggingface_hub tokenizers pandas
    pyarrow fsspec apex transformer_engine zmq grpc aiohttp requests urllib3 lightning_fabric nemo
    composer streaming webdataset colossalai bitsandbytes flash_attn liger_kernel unsloth einops
    multiprocess dill scipy sklearn PIL cv2 decord s3fs boto3 botocore hydra omegaconf click typer
    fire""".split()
)
# A user of this package looks for a line of the training loop, which may be ours; the monitor only
# watches it.
_OURS = re.compile(r"(?:^|/src/|-packages/)shakedown/(?P<beside>monitor/)?")
_STANDARD = re.compile(r"/lib(?:64)?/python\d\.\d+/(?!(?:site|dist)-packages/)|^<frozen")
_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/")
_SOURCES = (".py", ">", ".pyx", ".ipynb")  # `<stdin>`, `<string>`


@lru_cache(16384)
def owner_of(file: str) -> Owner:
    """The owner of the code in `file`; anything that is not Python counts as a library's.

    Args:
        file: as a traceback has it, or as py-spy and others shorten it.
    """
    if ours := _OURS.search(file):
        return "library" if ours["beside"] else "ours"
    relative = not file.startswith("/")
    if _STANDARD.search(file) or (relative and _top(file) in sys.stdlib_module_names):
        return "standard"
    known = _INSTALLED.search(file) or (relative and _top(file) in _LIBRARIES)
    return "library" if known or not file.endswith(_SOURCES) else "user"


def _top(file: str) -> str:
    return file.split("/", 1)[0].removesuffix(".py")
