"""Every import runs down the floors of docs/architecture.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "shakedown"
FLOORS = {
    "errors": 0,
    "paths": 1,
    "files": 1,
    "rows": 1,
    "cluster": 2,
    "verdict": 2,
    "config": 3,
    "preflight": 3,
    "serving": 3,
    "hang": 3,
    "reports": 3,
    "agents": 4,
    "consistency": 4,
    "training": 5,
    "cli": 6,
    "commands": 6,
}
HEAVY = ("torch", "transformers", "vllm", "megatron", "pandas", "plotly", "datasets")


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_module_stands_on_a_floor() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in _modules()}

    assert rooms - {"__init__", "__main__"} <= set(FLOORS)


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_down_and_rooms_of_a_floor_stay_apart(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for module in _imports(path):
        assert not module.startswith("snakemake_executor_plugin_submitit"), module
        other = _room(module) if module.startswith("shakedown.") else ""
        if not other or other == own or other not in FLOORS:
            continue
        same_entrance = {own, other} == {"cli", "commands"}
        assert FLOORS[other] < FLOORS[own] or same_entrance, f"{path} imports {module}"


def test_the_executor_does_not_import_shakedown() -> None:
    executor = SOURCE.parent / "executor" / "src" / "snakemake_executor_plugin_submitit"
    modules = [name for path in executor.rglob("*.py") for name in _imports(path)]

    assert modules
    assert not [name for name in modules if name.split(".")[0] == "shakedown"]


@pytest.mark.parametrize("arguments", [["--help"], ["lint", "config/config.yaml"]])
def test_light_commands_load_no_heavy_package(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from shakedown.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        f"print('loaded', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=SOURCE.parent,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "loaded []"
