"""Files that every Python process runs when it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shakedown.core.python_startup import environment

# Runs what it hides, as ours does: without a guard the two would call each other for ever.
CHAINED = """
import importlib.machinery, importlib.util, os, sys
print("theirs")
here = os.path.dirname(os.path.abspath(__file__))
others = [place for place in sys.path if place != here]
found = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if found:
    found.loader.exec_module(importlib.util.module_from_spec(found))
"""


def run(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "print('program')"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    names = [tmp_path / name for name in ("one.py", "two.py")]
    for path in names:
        path.write_text(f"print({path.stem!r})\n")
    return names


def test_two_files_are_run_once_each_whatever_asks_for_them_again(files: list[Path]) -> None:
    variables = environment(files[0], {"PYTHONPATH": ""})
    for file in (files[1], files[0]):
        variables = environment(file, variables)

    done = run(variables)

    assert (done.stdout.split(), done.stderr) == (["one", "two", "program"], "")


@pytest.mark.parametrize("theirs_first", [True, False])
def test_a_sitecustomize_beside_it_still_runs_and_before(
    files: list[Path], tmp_path: Path, *, theirs_first: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CHAINED)
    variables = environment(files[0], {"PYTHONPATH": str(tmp_path)})
    if theirs_first:
        variables["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{variables['PYTHONPATH']}"

    done = run(variables)

    assert (done.stdout.split()[-2:], done.stderr) == (["one", "program"], "")
    assert "theirs" in done.stdout


def test_a_file_that_raises_or_is_gone_is_told_and_ends_nothing(
    files: list[Path], tmp_path: Path
) -> None:
    files[0].write_text("raise ValueError('broken')\n")
    variables = environment(tmp_path / "gone.py", environment(files[0], environment(files[1], {})))

    done = run(variables)

    assert done.stdout.split() == ["two", "program"]
    assert "ValueError: broken" in done.stderr
    assert "gone.py" in done.stderr
