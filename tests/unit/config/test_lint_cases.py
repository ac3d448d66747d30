"""`shakedown lint` on configs with one fault each, and on as good as many without."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.config import load_config
from shakedown.training.lint import findings_of
from tests.unit.config.lint_cases import BROKEN, GOOD, Case, make_workspace

SHIPPED = Path("config/config.yaml")
BASES = {"demo": [SHIPPED], "own": [SHIPPED, Path("own.yaml")]}
NODE_LOCAL = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - that lint warns of them is the point


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all that the configs name, and copies of some in a node's own folders."""
    folder = tmp_path_factory.mktemp("lint")
    make_workspace(folder)
    copies = [place / f"shakedown-{folder.name}-{folder.parent.name}" for place in NODE_LOCAL]
    for copy in copies:
        copy.mkdir()
        shutil.copytree(folder / "models" / "llama", copy / "llama")
        shutil.copy(folder / "data" / "train.jsonl", copy)
        shutil.copy(folder / "agents" / "mine.py", copy)
    yield folder
    for copy in copies:
        shutil.rmtree(copy)


@pytest.fixture
def workspace(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `files` as the working directory."""
    monkeypatch.chdir(files)
    return files


def _laid(workspace: Path, base: str, change: str) -> list[Path]:
    here = f"shakedown-{workspace.name}-{workspace.parent.name}"
    path = Path("change.yaml")
    path.write_text(change.replace("{here}", here), encoding="utf-8")
    return [*BASES[base], path]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_fault_is_found_at_its_key(
    workspace: Path, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = _laid(workspace, case.base, case.change)

    code = main(["lint", *map(str, paths)])

    row = r"^ +(FAIL|WARN) \S+ \[config (\S+)\].*, at \S+\.yaml:\d+:\d+$"
    told = re.findall(row, capsys.readouterr().out, re.MULTILINE)
    assert (case.level.upper(), case.subject) in told
    # One fault is told once, and nothing that is right is told of.
    subjects = [subject for _, subject in told]
    assert sorted(set(subjects)) == sorted(subjects)
    assert set(subjects) <= {case.subject, *case.also}
    assert code == (2 if case.level == "fail" else 0)


@pytest.mark.parametrize(
    ("base", "change", "advised"), [row[1:] for row in GOOD], ids=[row[0] for row in GOOD]
)
def test_a_config_without_a_fault_is_not_refused(
    workspace: Path, base: str, change: str, advised: tuple[str, ...]
) -> None:
    config = load_config(*_laid(workspace, base, change))

    found = findings_of(config)

    assert [f for f in found if f.status != "warn"] == []
    assert {f.subject for f in found} == set(advised)


def test_no_two_cases_are_one() -> None:
    assert len({case.name for case in BROKEN}) == len({case.change for case in BROKEN}) >= 60
    assert len({row[0] for row in GOOD}) == len(GOOD) >= 40
