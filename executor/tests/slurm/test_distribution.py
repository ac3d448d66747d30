"""The distribution alone: built, installed into an empty environment, and run on a real Slurm."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.slurm_fixtures import PATIENCE, POLL

EXECUTOR = Path(__file__).resolve().parents[2]
CONSTRAINTS = EXECUTOR.parent / "constraints.txt"
PACKAGE = "snakemake_executor_plugin_submitit"
# What a package index may take; with wheels at hand it is about 20 s.
INSTALL_SECONDS = 600

SNAKEFILE = """
rule gather:
    input: expand("part{i}.json", i=range(3))
    output: "all.json"
    shell: "cat {input} > {output}"
rule part:
    input: "seed.txt"
    output: "part{i}.json"
    run:
        import importlib.util, json, sys
        names = ("torch", "shakedown", "snakemake_executor_plugin_submitit")
        there = {name: bool(importlib.util.find_spec(name)) for name in names}
        found = {"seed": open(input[0]).read(), "i": wildcards.i, "prefix": sys.prefix, **there}
        with open(output[0], "w") as stream:
            print(json.dumps(found), file=stream)
rule seed:
    output: "seed.txt"
    shell: "printf %s $SLURMD_NODENAME > {output}"
"""

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def run(*command: str | Path, seconds: float = PATIENCE) -> None:
    """Run a command that has to succeed; its environment names none of our sources."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=EXECUTOR,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # The build backend is among the pinned packages.
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder, EXECUTOR)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with nothing but the wheel, snakemake and what they need."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    install = (python, "-m", "pip", "install", "--constraint", CONSTRAINTS, wheel, "snakemake")
    run(*install, seconds=INSTALL_SECONDS)
    return python


def test_the_wheel_holds_the_typed_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    sources = {path.name for path in (EXECUTOR / "src" / PACKAGE).iterdir() if path.is_file()}
    assert {name.partition("/")[2] for name in names if name.startswith(f"{PACKAGE}/")} == sources
    assert "py.typed" in sources
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {PACKAGE}


def test_the_source_archive_holds_docs_and_tests(tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", tmp_path)

    (made,) = tmp_path.iterdir()
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"docs/intro.md", "docs/further.md", "tests/slurm/test_distribution.py"} <= names


def test_a_workflow_runs_where_nothing_else_is_installed(
    python: Path, slurm_env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE, encoding="utf-8")
    outer = {name: value for name, value in slurm_env.items() if name != "PYTHONPATH"}
    environment = {**outer, "PATH": f"{python.parent}{os.pathsep}{outer['PATH']}"}

    done = subprocess.run(
        [python.with_name("snakemake"), "--executor", "submitit", "--jobs", "5", *POLL],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    seed = (tmp_path / "seed.txt").read_text(encoding="utf-8")
    assert seed.startswith("n")
    lines = (tmp_path / "all.json").read_text(encoding="utf-8").splitlines()
    there = {"torch": False, "shakedown": False, PACKAGE: True}
    expected = {"seed": seed, "prefix": str(python.parents[1]), **there}
    assert [json.loads(line) for line in lines] == [{**expected, "i": str(i)} for i in range(3)]
