"""The hook of a rank: answers where it stands, even while blocked in a collective.

SIGUSR1 makes faulthandler write all stacks; a request file makes a thread write the Flight
Recorder. Both work while the main thread waits inside a collective, which releases the GIL.

gloo ends a process by abort() when a message does not fit what it expects: there is no exception,
and the reason stands in the Flight Recorders of all ranks. SIGABRT is therefore answered by
libc's sleep(), which takes the signal's number as its seconds: the process lives 6 s more, in
which all ranks are asked for their dumps; then abort() ends it as it would have. Where all have
written before, SIGABRT is sent again and not answered.
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from shakedown.core.errors import StorageError
from shakedown.core.files import atomic_open
from shakedown.core.leftovers import temporary_file
from shakedown.core.paths import EvidencePaths
from shakedown.core.private import file_mode, make_folders, open_own

_log = logging.getLogger(__name__)

# The launcher must set these before torch starts; the recorder reads them once.
ENVIRONMENT: dict[str, str] = {
    "TORCH_FR_BUFFER_SIZE": "2000",  # entries a rank keeps; older torch keeps none by itself
    "TORCH_FR_CPP_STACK": "0",  # Python frames alone: C++ frames cost a second to symbolise
}

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
        make_folders(evidence)
        stacks = open_own(EvidencePaths(evidence).stacks(name), os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        raise StorageError(f"cannot write {evidence}: {error.strerror}") from error
    stream = os.fdopen(stacks, "a", encoding="utf-8")
    _open_files.append(stream)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True, chain=False)
    if "torch" in sys.modules:
        _linger_at_abort(stream)
        thread = threading.Thread(
            target=_answer, args=(evidence, name), name="shakedown-evidence", daemon=True
        )
        thread.start()


def _linger_at_abort(stream: IO[str]) -> None:
    """Write all stacks to `stream` at SIGABRT, then sleep in the thread that aborts.

    faulthandler's handler calls the one before it, which is sleep().
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    faulthandler.enable(file=stream, all_threads=True)


def request(evidence: Path, token: str = "") -> None:
    """Ask every hooked rank to dump; `token` only has to differ from the last one."""
    with atomic_open(EvidencePaths(evidence).request) as stream:
        stream.write(token or str(time.time_ns()))


def leave_dump(rank: int, evidence: Path, role: str = "trainer") -> None:
    """Write the Flight Recorder of a rank that an exception ends, unless a dump exists.

    A dump that is there was written while the process stood: it is the better one.
    """
    name = component(role, rank)
    target = EvidencePaths(evidence).flight_recorder(name, "json")
    try:
        for suffix, dump in _dumps(_binding()):
            # No pickle: its frames cost an import of a second, in a process that is about to end.
            if suffix == "json" and not target.exists():
                _write(target, dump())
    except StorageError as error:
        _log.warning("flight recorder not written: %s", error)


def _answer(evidence: Path, name: str) -> None:
    """Poll forever for a request that is newer than the last one answered."""
    seen, aborted = _stamp(evidence), False
    # Tells a collector that this process can answer; without it nobody waits for the answer. Set
    # through /proc, as Python itself names threads to the kernel only from 3.14 on.
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD_NAME)
    while True:
        time.sleep(POLL_SECONDS)
        try:
            if not aborted and _has_aborted(evidence, name):
                aborted = True
                # This rank dumps as well, as it finds its own request just below.
                request(evidence)
            stamp = _stamp(evidence)
            if stamp not in (None, seen):
                seen = stamp
                dump_flight_recorder(evidence, name)
            elif aborted and all_have_written(evidence, name, os.environ.get("WORLD_SIZE", "")):
                _end_by_abort()
        except Exception as error:  # noqa: BLE001  # the next request is answered again
            _log.warning("flight recorder not written: %s", error)


def _has_aborted(evidence: Path, name: str) -> bool:
    """faulthandler wrote of a fatal signal: this process is about to end."""
    path = EvidencePaths(evidence).stacks(name)
    try:
        return path.stat().st_size > 0 and b"Fatal Python error: Aborted" in path.read_bytes()
    except OSError:
        return False


def all_have_written(evidence: Path, name: str, world: str) -> bool:
    """Whether the dumps of `world` components of this role are as new as the request for them."""
    role, paths = name.rpartition("-rank")[0], EvidencePaths(evidence)
    try:
        asked = paths.request.stat().st_mtime_ns
        names = paths.flight_recorder(f"{role}-rank*", "pickle").name
        dumps = [path.stat().st_mtime_ns for path in evidence.glob(names)]
    except OSError:
        return False
    return world.isdecimal() and sum(at >= asked for at in dumps) >= int(world) > 0


def _end_by_abort() -> None:
    ctypes.CDLL(None).signal(signal.SIGABRT, None)  # SIG_DFL: sleep() would answer it again
    os.kill(os.getpid(), signal.SIGABRT)


def _stamp(evidence: Path) -> tuple[int, int] | None:
    try:
        status = EvidencePaths(evidence).request.stat()
    except OSError:
        return None
    # The inode too: each request is a new file, and two may come within one tick of the clock.
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
        _write(EvidencePaths(evidence).flight_recorder(name, suffix), dump())


def _write(path: Path, body: bytes) -> None:
    """Whole or not at all, but without fsync: it may be what this process hangs in.

    Raises:
        StorageError: `path` cannot be written.
    """
    try:
        handle, partial = temporary_file(path)
        with os.fdopen(handle, "wb") as stream:
            stream.write(body)
        os.chmod(partial, file_mode())
        os.replace(partial, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def _binding() -> object:
    # None where torch was built without distributed.
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
