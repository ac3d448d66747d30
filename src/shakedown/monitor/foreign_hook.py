"""The hook of a foreign trainer's rank at `debug: info` and above, as `hook` is for ours.

Run by every Python process of the stage when it starts (core/python_startup.py), in an environment
that need not have this package: the standard library alone. A process without RANK is left alone.

SIGUSR1 makes faulthandler write all stacks, for where py-spy may not look; a thread writes torch's
Flight Recorder when the collector asks, once torch is loaded.
"""

import faulthandler
import importlib
import os
import signal
import sys
import threading
import time

EVIDENCE = "SHAKEDOWN_EVIDENCE"  # the folder; set by whoever starts the stage
_HOOKED = "SHAKEDOWN_HOOKED"  # of a rank: its children, which have its RANK, are not ranks
_THREAD_NAME = "shakedown-frec"  # the collector knows a process that can answer by it
_POLL_SECONDS = 0.5
_BINDING = "torch._C._distributed_c10d"
# NCCL's, else that of CPU backends; a name with _json at its end is the same dump as JSON.
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")


def install() -> None:
    """Register both where this process is a rank."""
    folder, rank = os.environ.get(EVIDENCE, ""), os.environ.get("RANK", "")
    if not folder or not rank.isdecimal() or _HOOKED in os.environ:
        return
    # Somebody's own handler has the first word.
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return
    os.environ[_HOOKED] = "1"
    name = f"trainer-rank{rank}"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(os.path.join(folder, f"faulthandler-{name}.txt"), flags, 0o600)
    # By its number: faulthandler keeps no file object alive, and this one is never closed.
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True, chain=False)
    arguments = (folder, name)
    threading.Thread(target=_answer, args=arguments, name=_THREAD_NAME, daemon=True).start()


def _answer(folder: str, name: str) -> None:
    """Poll forever for a request that is newer than the last one answered."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    request = os.path.join(folder, "REQUEST")
    seen, told = _stamp(request), False
    while True:
        time.sleep(_POLL_SECONDS)
        dump = _dump()
        # Only a rank that can answer says so: the collector waits for its answer.
        if dump and not told:
            told = True
            with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as stream:
                stream.write(_THREAD_NAME)
        stamp = _stamp(request)
        if dump and stamp not in (None, seen):
            seen = stamp
            _write_dumps(os.path.join(folder, f"fr-{name}"), dump)


def _write_dumps(path: str, dump: str) -> None:
    """JSON first: the pickle, which alone has frames, needs an import that may fail or block."""
    binding = sys.modules[_BINDING]
    _write(f"{path}.json", getattr(binding, f"{dump}_json")())
    importlib.import_module("torch._inductor")
    _write(f"{path}.pickle", getattr(binding, dump)())


def _dump() -> str:
    binding = sys.modules.get(_BINDING)
    return next((name for name in _DUMPS if hasattr(binding, f"{name}_json")), "")


def _stamp(request: str) -> "tuple[int, int] | None":
    try:
        status = os.stat(request)  # noqa: PTH116 - pathlib would be imported in every process
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _write(path: str, body: bytes) -> None:
    """Whole or not at all."""
    part = f"{path}.{os.getpid()}"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(body)
    os.replace(part, path)


install()
