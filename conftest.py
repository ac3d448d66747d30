"""What holds for all tests: Ctrl-C, and which of them share a worker of pytest-xdist."""

import os
import signal
import subprocess
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import exhaustive, leftovers

# A CI job that was started in the background ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several streams of tests share the cores: torch's threads that wait for each other in a loop take
# most of the time then. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests assert behaviour, never times: a busy machine makes no example fail.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Folders and files whose tests run one after the other on one worker, the longest first: what
# starts last ends last. Everywhere else a file is a group, so that its module's fixtures are made
# once.
_GROUPS = {
    # The demo's run serves the hang example too.
    "tests/workflow/test_demo.py": "demo",
    "tests/workflow/test_hang_example.py": "demo",
    # These end daemons and lose nodes of their cluster.
    "executor/tests/faults": "faults on Slurm",
    # One cluster a folder, which mostly waits.
    "tests/slurm": "on Slurm",
    "executor/tests/slurm": "executor on Slurm",
}


_REAPER = pytest.StashKey[subprocess.Popen[bytes]]()


class _Groups(LoadScopeScheduling):  # type: ignore[misc]
    """A worker takes a whole group. (The mark xdist_group has no effect in pytest 9.2: pytest-xdist
    3.8 writes it into an attribute that pytest no longer reads.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return _group_of(nodeid)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers of xdist inherit the mark
        config.stash[_REAPER] = leftovers.watch_this_run()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (reaper := config.stash.get(_REAPER, None)) is not None:
        reaper.communicate()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Groups:
    return _Groups(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups in the order of their start; a run without workers keeps pytest's own order."""
    for item in items:
        if exhaustive.is_left_out(item.nodeid):
            item.add_marker("exhaustive")
    if not hasattr(config, "workerinput"):
        return
    slow = sorted({_group_of(item.nodeid) for item in items if item.get_closest_marker("slow")})
    order = [*dict.fromkeys([*_GROUPS.values(), *slow])]
    ranks = {group: rank for rank, group in enumerate(order)}
    items.sort(key=lambda item: ranks.get(_group_of(item.nodeid), len(order)))


def _group_of(nodeid: str) -> str:
    path = nodeid.partition("::")[0]
    return _GROUPS.get(path) or _GROUPS.get(path.rpartition("/")[0], path)
