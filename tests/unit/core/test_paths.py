"""The results tree: its names stand in core/paths alone."""

import ast
from pathlib import Path

from shakedown.core import paths
from shakedown.core.paths import RunPaths

PACKAGE = Path(paths.__file__).parents[1]


def _joined(file: Path) -> set[str]:
    """Constants that the module joins to a path with `/`."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {
        node.right.value
        for node in nodes
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and isinstance(node.right, ast.Constant)
        and isinstance(node.right.value, str)
    }


def _named(file: Path) -> set[str]:
    """The last parts of what `Below` names in the module."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    calls = (n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "Below")
    return {Path(ast.literal_eval(call.args[0])).name for call in calls}


def test_no_other_module_spells_a_file_of_the_results_tree() -> None:
    own = Path(paths.__file__)
    names = _joined(own) | _named(own)
    known = {name for name in names if Path(name).suffix} | {"heartbeat", "evidence"}

    spelled = {
        str(file.relative_to(PACKAGE)): found
        for file in PACKAGE.rglob("*.py")
        if file != own and (found := _joined(file) & known)
    }

    assert "verdict.json" in known
    assert not spelled


def test_a_run_lies_where_the_workflow_and_the_guides_say() -> None:
    run = RunPaths(Path("results/demo"))

    assert str(run.preflight.accepted) == "results/demo/preflight/accepted.json"
    assert str(run.server("policy").endpoint) == "results/demo/serve/policy/endpoint.json"
    assert str(run.assets.file) == "results/demo/assets/assets.json"
    assert str(run.consistency.page) == "results/demo/consistency/report.html"
    assert str(run.stage("sft").attempt(7).log("trainer-rank0")) == (
        "results/demo/stages/sft/attempts/007/logs/trainer-rank0.log"
    )
