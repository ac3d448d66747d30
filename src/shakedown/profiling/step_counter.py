"""Count the steps of a user's program for a profile; run by each of its Python processes.

Steps are the calls of the first optimizer that steps (the first step begins with the first
forward), or those of a heartbeat. An error here is printed and never ends the program. It uses only
the standard library.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_POLL_SECONDS = 0.2


class _AfterImport(importlib.abc.MetaPathFinder):
    """An import hook that calls `act(module)` once the module of this name has been executed."""

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _quietly(lambda: self._act(module))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _quietly(act: Callable[[], None]) -> None:
    try:
        act()
    except Exception:  # noqa: BLE001 - a profile must not end what it looks at
        traceback.print_exc()


def _at_first_forward(act: Callable[[], None]) -> None:
    """Call `act` before the first forward of a module, in its thread."""

    def watch(module: Any) -> None:
        def forward(_module: Any, _args: Any) -> None:
            handle.remove()
            _quietly(act)

        handle = module.register_module_forward_pre_hook(forward)

    sys.meta_path.insert(0, _AfterImport("torch.nn.modules.module", watch))


def _count_optimizer_steps(capture: Any) -> None:
    _at_first_forward(lambda: capture.step(1))
    counted = 0
    counts: int | None = None  # id of the optimizer whose steps count

    def watch(module: Any) -> None:
        def stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            nonlocal counted, counts
            counts = counts or id(optimizer)
            if id(optimizer) == counts:
                counted += 1
                _quietly(lambda: capture.step(counted + 1))
            if capture.done:
                handle.remove()

        handle = module.register_optimizer_step_post_hook(stepped)

    sys.meta_path.insert(0, _AfterImport("torch.optim.optimizer", watch))


def _follow(beat: Path, capture: Any, prepare: Callable[[], None]) -> None:
    """Use a heartbeat's steps as those of this process once it computes."""

    def follow() -> None:
        while not capture.done:
            _quietly(lambda: capture.step(_step_of(beat)))
            time.sleep(_POLL_SECONDS)

    def start() -> None:
        prepare()
        threading.Thread(target=follow, name="shakedown-profile", daemon=True).start()

    _at_first_forward(start)


def _step_of(beat: Path) -> int:
    """The step in a heartbeat's record: a checksum, a blank, JSON (monitor/heartbeat.py)."""
    try:
        return int(json.loads(beat.read_bytes().partition(b" ")[2])["step"])
    except (OSError, ValueError, KeyError, TypeError):  # not there yet, or half written
        return 0


def _prepare(module: Any) -> None:
    """torch's profiler wants its first start in the thread that loaded torch."""
    first = module.new_torch_profile()
    first.start()
    first.stop()


def _install() -> None:
    if "SHAKEDOWN_PROFILE" not in os.environ:
        return
    spec = importlib.util.spec_from_file_location(
        "shakedown_capture", Path(__file__).with_name("capture.py")
    )
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the names in annotations there
    spec.loader.exec_module(module)
    order = module.read_order(os.environ)
    capture = module.Capture.of_this_process()
    if order is None or capture.done:
        return
    atexit.register(capture.close)
    if order.steps_by == module.OPTIMIZER:
        _count_optimizer_steps(capture)
    elif order.steps_by:
        _follow(Path(order.steps_by), capture, lambda: _prepare(module))


_quietly(_install)
