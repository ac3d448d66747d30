"""Frames of a stack, and whose code they are: the user's, a library's, Python's own, ours."""

import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

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
    fire jax jaxlib flax optax orbax tensorstore tensorrt_llm mpi4py MPI.src levanter haliax horovod
    byteps lmdeploy""".split()
)
# A user of this package looks for a line of the training loop, which may be ours; the monitor only
# watches it.
_OURS = re.compile(r"(?:^|/src/|-packages/)shakedown/(?P<beside>monitor/)?")
_STANDARD = re.compile(r"/lib(?:64)?/python\d\.\d+/(?!(?:site|dist)-packages/)|^<frozen")
_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/")
_SOURCES = (".py", ">", ".pyx", ".ipynb")  # `<stdin>`, `<string>`


class Frame(NamedTuple):
    """One call. `file` is as the tool printed it, shortened or full; `line` 0 when unknown."""

    name: str
    file: str
    line: int = 0

    @property
    def function(self) -> str:
        """The bare function name: py-spy prefixes the class, `<locals>` marks closures."""
        return self.name.rsplit(".", 1)[-1]

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.file}:{self.line})" if self.line else f"{self.name} ({self.file})"
        )


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


def is_user(frame: Frame) -> bool:
    """Of the user's own code; our own package counts as user."""
    return owner_of(frame.file) in ("user", "ours")


def is_standard(frame: Frame) -> bool:
    """Of Python's standard library."""
    return owner_of(frame.file) == "standard"


def python_frames(path: Sequence[Frame]) -> list[Frame]:
    """Those of Python, without what it calls in C, C++ and the drivers."""
    return [f for f in path if f.file.endswith((".py", ">", ".pyx", ".ipynb"))]


def user_frames(path: Sequence[Frame]) -> list[Frame]:
    """The frames of the user's own code, outermost first."""
    return [frame for frame in path if is_user(frame)]


# `train.py`, `_ops.pyx`, `<string>`; a file that ends otherwise (`libc10.so`) is native code.
_PYTHON = re.compile(r"(?:\.pyx?|>)$")
# Plain waits and wrappers: the frame outside of them tells what is waited for.
_PASSED = re.compile(
    r"torch/cuda/(?:__init__|streams)\.py$|(?:^|/)(?:threading|contextlib|functools)\.py$"
    r"|torch/utils/_contextlib\.py$|torch/distributed/c10d_logger\.py$"
)


def innermost(path: Sequence[Frame]) -> Frame | None:
    """The innermost Python frame below which only native code or a plain wait stands."""
    rows = (f for f in reversed(path) if _PYTHON.search(f.file) and not _PASSED.search(f.file))
    return next(rows, None)


@lru_cache(4096)  # many ranks share few paths
def library_calls(path: tuple[Frame, ...]) -> tuple[tuple[str, str], ...]:
    """Function and file of each Python frame, without lines: which code of a library it is.

    A native frame, a wrapper or a plain wait makes no other path.
    """
    kept = [f for f in path if _PYTHON.search(f.file) and not _PASSED.search(f.file)]
    return tuple((f.function, f.file.rsplit("/", 1)[-1]) for f in kept)
