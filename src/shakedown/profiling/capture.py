"""Profile this process over a range of steps.

Under nsys, CUDA's profiler calls tell it when to record; without nsys torch's own profiler writes a
Chrome trace. It uses only the standard library and torch, nothing of shakedown: users' interpreters
load this file by its path (step_counter.py), even if shakedown is not installed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

VARIABLE = "SHAKEDOWN_PROFILE"
TRACE, STEPS = (
    ".json.gz",
    ".steps.json",
)  # suffixes of files that a process leaves in its scratch folder
OPTIMIZER = "optimizer"  # steps are the calls of the first optimizer that steps in a process


@dataclass(frozen=True)
class Order:
    """The order for a process that may be profiled, as JSON in VARIABLE.

    `worker` names its files; `patterns` are matched against `worker`, `component` and
    `{component}-rank{RANK}`. `start` and `stop` count steps from 1, `stop` is the first one that is
    not profiled (None: to the end). `label` is the range as in file names.

    `steps_by`: who counts the steps: OPTIMIZER, the path of a heartbeat to follow, or empty for a
    process that calls `Capture.step` itself. `nsys`: whether it runs under nsys. `scratch`: the
    folder for files; `target`: the folder that they are moved to.
    """

    worker: str
    component: str
    patterns: tuple[str, ...]
    start: int
    stop: int | None
    label: str
    target: str
    steps_by: str = ""
    nsys: bool = False
    scratch: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def names(self, environ: Mapping[str, str]) -> list[str]:
        """The names of the process with these variables, the most specific last."""
        rank = environ.get("RANK", "")
        ranked = [f"{self.component}-rank{rank}"] if rank.isdecimal() else []
        return [self.worker, self.component, *ranked]


def read_order(environ: Mapping[str, str]) -> Order | None:
    """The order in VARIABLE, or None."""
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    body = json.loads(text)
    return Order(**{**body, "patterns": tuple(body["patterns"])})


def matching(patterns: Sequence[str], names: Sequence[str]) -> str:
    """The first pattern that matches one of the names, as in `fnmatch`; empty if none does."""
    return next((p for p in patterns if any(fnmatch.fnmatch(n, p) for n in names)), "")


def tell(what: str) -> None:
    """Print a remark; the log may be on the very disk that is full."""
    with contextlib.suppress(OSError):
        print(what, file=sys.stderr, flush=True)


class Capture:
    """Record from the start of step `start` to the start of step `stop`, once per process.

    Errors in a profiler are not raised but printed, and noted in the scratch folder for the
    launcher.
    """

    def __init__(self, order: Order | None) -> None:
        self._order = order
        self._tool: _Nsys | _TorchTrace | None = None
        self._owner = 0
        self._stem = Path()
        self._steps: dict[str, Any] = {"first": None, "last": None, "said": ""}
        self.done = order is None

    @classmethod
    def of_this_process(cls) -> Capture:
        """The capture that the environment requests; it does nothing if none is requested."""
        order = read_order(os.environ)
        wanted = order is not None and order.scratch
        wanted = wanted and matching(order.patterns, order.names(os.environ))  # type: ignore[union-attr]
        return cls(order if wanted else None)

    @property
    def recording(self) -> bool:
        return self._tool is not None

    def step(self, number: int) -> None:
        """Note that step `number` begins and the one before has ended."""
        order = self._order
        if self.done or order is None or number < order.start:
            return
        if order.stop is not None and number >= order.stop:
            self.close()
            return
        if self._tool is None:
            self._begin(order)
        if self._tool is not None and number != self._steps["last"]:
            self._steps["first"] = self._steps["first"] or number
            self._steps["last"] = number
            self._tool.mark(f"step {number}")
            self._note()

    def close(self) -> None:
        """Note that the last step has ended; does nothing if none was recorded, or in a forked
        child."""
        tool, self._tool = self._tool, None
        if tool is None or self._owner != os.getpid():
            return
        self.done = True
        tell(f"profile: steps {self._steps['first']} to {self._steps['last']}")
        with self._faults():
            tool.stop()

    def _begin(self, order: Order) -> None:
        import torch

        self._owner = os.getpid()
        self._stem = Path(order.scratch, f"{order.worker}_{order.label}_{self._owner}")
        with self._faults():
            if order.nsys and torch.cuda.is_available():
                tool: _Nsys | _TorchTrace = _Nsys()
            else:
                if order.nsys:
                    self._say("nsys records by CUDA's profiler calls and this process has no GPU")
                tool = _TorchTrace(self._file(TRACE))
            tool.start()
            self._tool = tool
        self.done = self._tool is None

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Run `act`; a profiler must not end the program."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._say(f"{type(error).__name__}: {error}")

    def _say(self, what: str) -> None:
        tell(f"profile: {what}")
        self._steps["said"] = what[:1000]
        self._note()

    def _note(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the trace will report it
            partial = self._file(".part")
            partial.write_text(json.dumps(self._steps), encoding="utf-8")
            partial.replace(self._file(STEPS))

    def _file(self, suffix: str) -> Path:
        return self._stem.with_name(self._stem.name + suffix)


class _Nsys:
    """A tool for a process under nsys, which waits for these calls
    (--capture-range=cudaProfilerApi)."""

    def __init__(self) -> None:
        self._marked = False

    def start(self) -> None:
        import torch

        torch.cuda.profiler.start()

    def mark(self, name: str) -> None:
        import torch

        self._unmark()
        torch.cuda.nvtx.range_push(name)
        self._marked = True

    def _unmark(self) -> None:
        import torch

        if self._marked:
            torch.cuda.nvtx.range_pop()
        self._marked = False

    def stop(self) -> None:
        import torch

        torch.cuda.synchronize()  # kernels that the last step began
        self._unmark()
        torch.cuda.profiler.stop()


class _TorchTrace:
    """A tool that writes a Chrome trace of CPU and GPU activity, with each step as a named
    event."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._step: Any = None
        self._profile = new_torch_profile()

    def start(self) -> None:
        self._profile.start()

    def mark(self, name: str) -> None:
        import torch

        self._unmark()
        self._step = torch.profiler.record_function(name)
        self._step.__enter__()

    def _unmark(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def stop(self) -> None:
        self._unmark()
        self._profile.stop()
        plain = self._file.with_name(f".{self._file.name}.plain")
        packed = self._file.with_name(f".{self._file.name}.part")
        try:
            self._profile.export_chrome_trace(str(plain))
            _check_whole(plain)
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            packed.replace(self._file)
        finally:
            for left in (plain, packed):
                left.unlink(missing_ok=True)


def new_torch_profile() -> Any:
    """torch's profiler over all threads of this process, as its steps may be counted by one.

    An older torch records only the thread that starts it.
    """
    import torch
    from torch._C._profiler import _ExperimentalConfig

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        everywhere = _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        everywhere = None
    return torch.profiler.profile(activities=kinds, experimental_config=everywhere)


def _check_whole(trace: Path) -> None:
    """Check that a trace is complete: it must end with a brace, as torch's writer ignores a full
    disk.

    Raises:
        OSError: it was cut off.
    """
    with trace.open("rb") as stream:
        stream.seek(max(0, trace.stat().st_size - 16))
        if not stream.read().rstrip().endswith(b"}"):
            raise OSError(f"the trace was cut off, is {trace.parent} full?")
