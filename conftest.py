"""What holds for all tests: Ctrl-C, and which of them share a worker of pytest-xdist."""

import signal

import pytest

# A CI job that was started in the background ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Folders whose tests run one after the other on one worker, the longest first: what starts last
# ends last. Everywhere else a file is a group, so that its module's fixtures are made once.
_GROUPS = {
    # These end daemons and lose nodes of their cluster.
    "executor/tests/faults": "faults on Slurm",
    # One cluster for both, which mostly waits.
    "executor/tests/slurm": "on Slurm",
    "tests/slurm": "on Slurm",
    # Snakemake runs in the repository's root; the demo's run serves the hang example too.
    "tests/workflow": "workflow",
}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests for `--dist loadgroup`; a run without workers keeps pytest's own order."""
    if not hasattr(config, "workerinput"):
        return
    slow = {_group_of(item) for item in items if item.get_closest_marker("slow")}
    order = [*dict.fromkeys(_GROUPS.values()), *sorted(slow)]
    ranks = {group: rank for rank, group in reversed(list(enumerate(order)))}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group_of(item)))
    items.sort(key=lambda item: ranks.get(_group_of(item), len(order)))


def _group_of(item: pytest.Item) -> str:
    path = item.path.relative_to(item.config.rootpath)
    return _GROUPS.get(path.parent.as_posix(), path.as_posix())
