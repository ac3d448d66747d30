"""Processes of a job that are no ranks: launchers, loaders' workers, trackers, compilers."""

import re
from functools import lru_cache

from shakedown.diagnosis.records import Stack
from shakedown.monitor.collect import proc
from shakedown.stacks.frames import Frame

# Frames of a launcher's own process. Not all of `elastic/multiprocessing`: a program that uses
# `@record`, or was started as a function (`_wrap`), has frames of it on the path of every rank.
_LAUNCHER = re.compile(
    r"torch/distributed/(?:(?:run|launch)\.py|launcher/|elastic/agent/)"
    r"|accelerate/commands/|deepspeed/launcher/"
)
_ELASTIC = re.compile(
    r"torch/distributed/elastic/multiprocessing/(?:api|subprocess_handler/\w+)\.py$"
)
# Processes beside the ranks: workers of data loaders, trackers, compilers.
_HELPER = re.compile(
    r"torch/utils/data/_utils/worker\.py$|multiprocessing/(?:resource_tracker|forkserver)\.py$"
    r"|torch/_inductor/compile_worker|wandb/(?:sdk/)?(?:service|internal)"
)


def is_helper(stack: Stack) -> bool:
    main = stack.main
    return main is not None and _helps(main.frames)


@lru_cache(4096)  # many ranks share few paths
def _helps(path: tuple[Frame, ...]) -> bool:
    return any(_HELPER.search(frame.file) for frame in path)


def is_launcher(stack: Stack) -> bool:
    main = stack.main
    frames = main.frames if main else ()
    launches = any(
        _LAUNCHER.search(f.file) or (_ELASTIC.search(f.file) and f.function != "_wrap")
        for f in frames
    )
    return launches or proc.is_launch(stack.command) or is_helper(stack)
