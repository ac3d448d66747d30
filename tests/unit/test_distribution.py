"""The distribution: what its metadata promises, and what runs where it alone is installed."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import lock
import pytest
import yaml
from packaging.requirements import Requirement

from shakedown import __version__
from shakedown.cli import COMMANDS, EXTRAS
from tests.workflow.report_run import write_run

ROOT = Path(__file__).parents[2]
PROJECTS = (ROOT / "pyproject.toml", ROOT / "executor" / "pyproject.toml")
WITHOUT_EXTRAS = (
    "hang lint report status logs accept verdict allocation preflight serve debug watch".split()
)
# What a package index may take; with wheels at hand it is about 30 s.
INSTALL_SECONDS = 600

Done = subprocess.CompletedProcess[str]


def run(*command: str | Path, seconds: float = 120) -> Done:
    """Run a command in the checkout; its environment names none of our sources."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )


def install(*command: str | Path) -> str:
    done = run(*command, seconds=INSTALL_SECONDS)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_each_extra_holds_the_packages_that_its_commands_ask_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    for extra, packages in EXTRAS.values():
        held = {re.split(r"[\[<>=]", row)[0] for row in project["optional-dependencies"][extra]}
        assert set(packages) <= held
    assert set(COMMANDS) == {*EXTRAS, *WITHOUT_EXTRAS}


def test_changelog_and_citation_tell_the_version_and_its_date() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))

    newest = re.search(r"^## (\d\S*) - (\S+)$", changes, re.MULTILINE)

    assert newest
    assert newest.groups() == (citation["version"], citation["date-released"])
    assert newest[1] == __version__


def test_the_repositorys_address_is_the_same_everywhere() -> None:
    address = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"]

    for path in PROJECTS:
        urls = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["urls"]
        assert urls["Repository"] == address
        assert all(url.startswith(address) for url in urls.values())


def test_addresses_within_the_repository_are_those_of_its_files() -> None:
    pages = (*PROJECTS, ROOT / "executor" / "README.md", ROOT / "docs" / "intro.md")
    text = "".join(path.read_text(encoding="utf-8") for path in pages)

    places = re.findall(r"shakedown-rl/shakedown/(?:blob|tree)/main/([\w./-]*\w)", text)

    assert "executor/docs/further.md" in places
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_the_plugin_catalogue_finds_the_executors_introduction() -> None:
    # It looks for docs/intro.md in the root of a plugin's repository, and follows no link.
    shown = ROOT / "docs" / "intro.md"

    assert not shown.is_symlink()
    assert shown.read_text() == (ROOT / "executor" / "docs" / "intro.md").read_text()


def test_both_distributions_take_the_same_snakemake_the_pinned_one_among_them() -> None:
    ours, executor = (
        tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in PROJECTS
    )
    rows = [*ours["optional-dependencies"]["workflow"], *executor["dependencies"]]
    pinned = re.search(r"^snakemake==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

    found = [need for need in map(Requirement, rows) if need.name == "snakemake"]

    assert pinned
    assert len(found) == 2
    assert {str(need.specifier) for need in found} == {"<10,>=9.19"}
    assert found[0].specifier.contains(pinned[1])
    assert f"Snakemake {pinned[1]}" in (ROOT / "executor" / "README.md").read_text()


def test_the_forge_runs_targets_of_the_makefile_on_every_python_of_the_locks() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)

    jobs = yaml.safe_load(text)["jobs"]

    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == ["make lint", "make check", "make test"]
    assert {command.removeprefix("make ") for command in commands} <= set(targets)
    assert tuple(jobs["check"]["strategy"]["matrix"]["python"]) == lock.PYTHONS


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of this repository: slurm-shakedown and the executor."""
    folder = tmp_path_factory.mktemp("wheels")
    # The build backend is among the pinned packages.
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    pip = (sys.executable, "-m", "pip", "wheel")
    install(*pip, *offline, "--wheel-dir", folder, ROOT, ROOT / "executor")
    return folder


@pytest.fixture(scope="module")
def python(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with slurm-shakedown and what its metadata asks for."""
    folder = tmp_path_factory.mktemp("venv")
    install(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    (wheel,) = wheels.glob("slurm_shakedown-*.whl")
    install(python, "-m", "pip", "install", "--constraint", ROOT / "constraints.txt", wheel)
    return python


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results") / "demo"
    write_run(root, hang=False)
    return root


@pytest.mark.slow
def test_the_wheel_holds_the_typed_package_with_its_templates_and_nothing_else(
    wheels: Path,
) -> None:
    (wheel,) = wheels.glob("slurm_shakedown-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "shakedown",
        "slurm_shakedown",
    }
    assert {"shakedown/py.typed", "shakedown/report/templates/index.html"} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "commands:"),
        (["lint", "config/config.yaml"], 0, "is sound"),
        *(
            (["lint", f"config/examples/{path.name}"], 0, "is sound")
            for path in sorted((ROOT / "config" / "examples").glob("*.yaml"))
        ),
        (["lint", "tests/data/foreign/areal/gsm8k_grpo.yaml"], 0, "no installed AReaL was found"),
        (["hang", "analyze", "tests/data/hang_dumps/b_cond"], 1, "conditional_collective"),
        (["hang", "analyze", "tests/data/fr_traces/lock_gil_1st"], 1, "hang: FAIL"),
        (["report", "RUN"], 0, "report: "),
        (["status", "RUN", "--no-probe"], 0, "demo"),
        (["verdict", "RUN/preflight/verdict.json"], 0, "preflight: PASS"),
        (["accept", "RUN/preflight/verdict.json"], 0, "PASS"),
        (["logs", "RUN", "--tail", "1"], 0, "|"),
        (["allocation", "fsdp:d2"], 0, "total: 2 GPUs"),
        (["allocation", "fsdp:x2"], 2, "fsdp:x2"),
        (["agent", "run", "--help"], 0, "--base-url"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_without_extras_runs_where_nothing_else_is_installed(
    python: Path, finished_run: Path, arguments: list[str], code: int, said: str
) -> None:
    given = [argument.replace("RUN", str(finished_run)) for argument in arguments]

    done = run(python.with_name("shakedown"), *given)

    assert done.returncode == code, done.stdout
    assert said in done.stdout


@pytest.mark.slow
def test_preflight_without_torch_checks_the_rest_and_names_the_extra(
    python: Path, tmp_path: Path
) -> None:
    done = run(python.with_name("shakedown"), "preflight", "--out", tmp_path)

    assert done.returncode == 3, done.stdout
    assert "network_worker could not run" in done.stdout
    assert "torch is not installed: pip install 'slurm-shakedown[train]'" in done.stdout
    assert " 0 failed," in done.stdout
    assert " 1 could not run" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["train", "sft", "--config", "config/config.yaml"], "train"),
        (["assets", "--config", "config/config.yaml", "--out", "OUT"], "train"),
        (["compare", "--out", "OUT"], "consistency"),
        (["agent", "run", "my:Agent", "--data", "rows.jsonl", "--out", "OUT"], "agents"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_whose_packages_are_missing_says_which_extra_to_install(
    python: Path, tmp_path: Path, arguments: list[str], extra: str
) -> None:
    out = tmp_path / "out"

    done = run(python.with_name("shakedown"), *(a.replace("OUT", str(out)) for a in arguments))

    assert done.returncode == 3, done.stdout
    assert f"shakedown {arguments[0]} needs packages that are not installed here" in done.stdout
    assert done.stdout.endswith(f"next: pip install 'slurm-shakedown[{extra}]'\n")
    assert not out.exists()


@pytest.mark.slow
def test_the_extra_for_the_workflow_takes_the_executor_and_no_torch(
    python: Path, wheels: Path
) -> None:
    pip = (python, "-m", "pip", "install", "--dry-run", "--find-links", wheels)

    chosen = install(*pip, "--constraint", ROOT / "constraints.txt", "slurm-shakedown[workflow]")

    assert "snakemake-executor-plugin-submitit-" in chosen
    assert " torch-" not in chosen


@pytest.mark.slow
def test_torch_is_not_installed_without_an_extra(python: Path) -> None:
    done = run(python, "-c", "import torch")

    assert "No module named 'torch'" in done.stdout
