"""Pages beside the code: each file, folder and name that they mention is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "shakedown"
PAGES = sorted(PACKAGE.rglob("README.md"))

# `training/trainer.py`: `Trainer.run`, or a path alone
_PATH = re.compile(r"`(\w+/[\w/.]*)`(?::\s+`([\w.]+)`)?")
# `Trainer.run`, `TrainEngine`, `ENGINES`
_NAME = re.compile(r"`([A-Z]\w+(?:\.\w+)?)`")


def _defined(module: Path) -> set[str]:
    """Classes, functions and constants of a module, methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return found


def _file(path: str) -> Path:
    return (ROOT if path.startswith("tests/") else PACKAGE) / path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_each_path_and_each_name_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    mentions = _PATH.findall(text)
    paths = {path for path, _ in mentions}

    missing = sorted(path for path in paths if not _file(path).exists())
    misplaced = [
        f"{path}: {name}"
        for path, name in mentions
        if name and path not in missing and name not in _defined(_file(path))
    ]
    modules = [_file(path) for path in paths - set(missing) if path.endswith(".py")]
    unknown = set(_NAME.findall(text)) - {name for file in modules for name in _defined(file)}

    assert len(paths) > 10
    assert not missing
    assert not misplaced
    assert not unknown


def test_the_architecture_names_only_modules_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    modules = [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("src/**/*.py")]
    modules += [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("tests/**/*.py")]

    assert len(named) > 30
    assert not [name for name in named if not any(m.endswith(f"/{name}") for m in modules)]


def test_there_is_a_page_and_each_is_short() -> None:
    assert PACKAGE / "training" / "README.md" in PAGES
    assert all(len(page.read_text(encoding="utf-8").splitlines()) < 120 for page in PAGES)


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("X: int = 1\n\nclass A:\n    def run(self): ...\n")

    assert _defined(module) == {"X", "A", "A.run"}
    assert _PATH.findall("`a/b.py`:\n  `A.run` and `c/d`") == [("a/b.py", "A.run"), ("c/d", "")]
