"""Every import runs down the layers of docs/architecture.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "shakedown"
LAYERS = (
    ("processes", "progress", "stacks"),
    ("core",),
    ("slurm",),
    ("cluster", "data_sources"),
    ("config", "debug", "inference", "models", "monitor", "preflight"),
    ("agents", "consistency", "diagnosis", "profiling"),
    ("report", "rollout"),
    ("agent_checks", "training"),
    ("cli", "commands"),
)
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
HEAVY = ("torch", "transformers", "vllm", "megatron", "pandas", "datasets")


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def _package(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE) + [
        PACKAGE / "cli.py"
    ]


def test_every_package_has_a_layer() -> None:
    assert {_package(path) for path in _modules()} == set(LAYER_OF)


def test_imports_run_down_and_packages_of_a_layer_stay_apart() -> None:
    wrong = []
    for path in _modules():
        own = _package(path)
        for module in _imports(path):
            top, _, rest = module.partition(".")
            other = rest.partition(".")[0]
            if top == "snakemake_executor_plugin_submitit":
                wrong.append(f"{path} imports {module}")
            if top != "shakedown" or other in ("", own, "__version__"):
                continue
            if LAYER_OF[other] >= LAYER_OF[own] and (own, other) != ("cli", "commands"):
                wrong.append(f"{path} imports {module}")

    assert not wrong


def test_the_executor_does_not_import_shakedown() -> None:
    executor = SOURCE.parent / "executor" / "src" / "snakemake_executor_plugin_submitit"
    modules = [name for path in executor.rglob("*.py") for name in _imports(path)]

    assert modules
    assert not [name for name in modules if name.split(".")[0] == "shakedown"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["lint", "config/config.yaml"],
        ["train", "sft", "--config", "config/config.yaml", "--plan"],
        ["hang", "analyze", "tests/data/hang_dumps/b_cond"],
    ],
    ids=" ".join,
)
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
