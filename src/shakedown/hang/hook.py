"""What a rank prepares so that it can be asked where it stands, even blocked in a collective.

SIGUSR1 makes faulthandler write all stacks; a request file makes a thread write the Flight
Recorder. Both work while the main thread waits inside a collective, which releases the GIL.
"""

import contextlib
import faulthandler
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from shakedown.errors import StorageError
from shakedown.files import atomic_open

_log = logging.getLogger(__name__)

# The launcher must set these before torch starts; the recorder reads them once.
ENVIRONMENT: dict[str, str] = {
    "TORCH_FR_BUFFER_SIZE": "2000",  # entries a rank keeps; 0, the preset, records nothing
    "TORCH_FR_CPP_STACK": "0",  # Python frames alone: C++ frames cost a second to symbolise
}

REQUEST = "REQUEST"
POLL_SECONDS = 0.5
THREAD_NAME = "shakedown-frec"  # as the kernel shows it: at most 15 characters

# faulthandler keeps only the descriptor: the file object must stay referenced.
_open_files: list[IO[str]] = []


def component(role: str, rank: int) -> str:
    """`trainer-rank0`: how evidence files name a component."""
    return f"{role}-rank{rank}"


def install(rank: int, evidence: Path, role: str = "trainer") -> None:
    """Register faulthandler on SIGUSR1 and, where torch is loaded, the Flight Recorder's thread.

    Call it after `import torch` and before the first collective. Writes
    `evidence/faulthandler-<role>-rank<rank>.txt` on SIGUSR1, and `fr-<role>-rank<rank>.json`
    and `.pickle` whenever `evidence/REQUEST` is written anew.

    Raises:
        StorageError: `evidence` cannot be written.
    """
    name = component(role, rank)
    try:
        evidence.mkdir(parents=True, exist_ok=True)
        stream = (evidence / f"faulthandler-{name}.txt").open("a", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {evidence}: {error.strerror}") from error
    _open_files.append(stream)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True, chain=False)
    if "torch" in sys.modules:
        thread = threading.Thread(
            target=_answer, args=(evidence, name), name="shakedown-evidence", daemon=True
        )
        thread.start()


def request(evidence: Path, token: str = "") -> None:
    """Ask every hooked rank to dump; `token` only has to differ from the last one."""
    with atomic_open(evidence / REQUEST) as stream:
        stream.write(token or str(time.time_ns()))


def _answer(evidence: Path, name: str) -> None:
    """Poll for a request that is newer than the last one answered, for ever."""
    seen = _stamp(evidence)
    # tells a collector that this process can answer; without it nobody waits for the answer
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD_NAME)
    while True:
        time.sleep(POLL_SECONDS)
        stamp = _stamp(evidence)
        if stamp not in (None, seen):
            seen = stamp
            try:
                dump_flight_recorder(evidence, name)
            except Exception as error:  # noqa: BLE001  # the next request is answered again
                _log.warning("flight recorder not written: %s", error)


def _stamp(evidence: Path) -> tuple[int, int] | None:
    try:
        status = (evidence / REQUEST).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def dump_flight_recorder(evidence: Path, name: str) -> None:
    """Write JSON first, then the pickle, which alone has frames.

    The pickle symbolises frames through torch._inductor (1.2 s and 140 MB where it is not
    loaded yet), so it comes second: an import that fails or blocks costs the frames only.

    Raises:
        StorageError: `evidence` cannot be written.
    """
    binding = _binding()
    for suffix, dump in _dumps(binding):
        if suffix == "pickle":
            import torch._inductor  # noqa: F401
        body = dump()
        with atomic_open(evidence / f"fr-{name}.{suffix}", "wb") as stream:
            stream.write(body)


def _binding() -> object:
    import torch.distributed  # noqa: F401

    return sys.modules.get("torch._C._distributed_c10d")


def _dumps(binding: object) -> list[tuple[str, Callable[[], bytes]]]:
    """The dump functions this torch has: NCCL's recorder, else the one of the CPU backends."""
    for json_name, pickle_name in (
        ("_dump_nccl_trace_json", "_dump_nccl_trace"),
        ("_dump_fr_trace_json", "_dump_fr_trace"),
    ):
        found = [("json", getattr(binding, json_name, None))]
        found.append(("pickle", getattr(binding, pickle_name, None)))
        usable = [(suffix, dump) for suffix, dump in found if dump is not None]
        if usable:
            return usable
    return []
