"""Read the keys of AReaL's and prime-rl's configs from checkouts, for `shakedown lint`.

    python scripts/foreign_keys.py AREAL_CHECKOUT PRIME_RL_CHECKOUT

Writes src/shakedown/config/foreign/{areal,prime_rl}_keys.json. The classes are read, not imported:
their packages need torch and a GPU's libraries. JSON: `source` (repository@commit), `kinds` (what a
file may configure -> its class) and `classes` (class -> key -> classes that may stand below it).
The class `*` stands for anything: dictionaries, and classes of other packages.
"""

import argparse
import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shakedown.core.files import write_json

TARGET = Path(__file__).parents[1] / "src" / "shakedown" / "config" / "foreign"
ANYTHING = "*"
_OPEN = {"dict", "Any"}  # annotations under which any key may stand

AREAL = {"RL": "PPOConfig", "SFT": "SFTConfig", "reward model": "RWConfig", "DPO": "DPOConfig"}
PRIME_RL = {
    "RL": "rl.RLConfig",
    "SFT": "sft.SFTConfig",
    "evals": "evals.EvalsConfig",
    "trainer": "trainer.TrainerConfig",
    "orchestrator": "orchestrator.OrchestratorConfig",
    "inference": "inference.InferenceConfig",
}


@dataclass
class Module:
    """Classes and type aliases of one file, and what its names mean."""

    name: str
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    aliases: dict[str, ast.expr] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)


class Schema:
    """The classes that are reached from the kinds of a project."""

    def __init__(self, files: list[Path], *, qualified: bool) -> None:
        """`qualified`: classes of several files may share a name, so the file's is put before."""
        self.modules = {path.stem: _read(path) for path in files}
        self.qualified = qualified
        self.classes: dict[str, dict[str, list[str]]] = {}

    def add(self, module: Module, name: str) -> str:
        """Put a class and all that it holds into `classes`; its name there, or `*`."""
        owner, node = self._find(module, name)
        if node is None:
            return ANYTHING
        full = f"{owner.name}.{node.name}" if self.qualified else node.name
        if full not in self.classes:
            keys = self.classes[full] = {}
            for key, annotation, where in self._fields(owner, node):
                keys[key] = sorted(set(self._below(where, annotation)))
            if 'extra="allow"' in ast.unparse(node).replace("'", '"'):
                keys[ANYTHING] = []
        return full

    def _find(self, module: Module, name: str) -> tuple[Module, ast.ClassDef | None]:
        if name in module.classes:
            return module, module.classes[name]
        source, original = module.imported.get(name, ("", ""))
        other = self.modules.get(source)
        return self._find(other, original) if other else (module, None)

    def _fields(self, module: Module, node: ast.ClassDef) -> Iterator[tuple[str, ast.expr, Module]]:
        for base in node.bases:
            owner, parent = self._find(module, ast.unparse(base))
            if parent is not None:
                yield from self._fields(owner, parent)
        for row in node.body:
            if not isinstance(row, ast.AnnAssign) or not isinstance(row.target, ast.Name):
                continue
            if "ClassVar" not in ast.unparse(row.annotation):
                yield row.target.id, row.annotation, module

    def _below(self, module: Module, annotation: ast.expr) -> Iterator[str]:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body  # a forward reference
        for node in ast.walk(annotation):
            if isinstance(node, ast.Attribute):  # `vf.EnvConfig`, of another package
                yield ANYTHING
            if isinstance(node, ast.Constant) and str(node.value).startswith("VLMConfig"):
                yield self.add(module, "VLMConfig")
            if not isinstance(node, ast.Name):
                continue
            owner, alias = self._alias(module, node.id)
            if alias is not None:
                yield from self._below(owner, alias)
            elif node.id in _OPEN or node.id == "AutoRendererConfig":
                yield ANYTHING
            elif node.id.endswith(("Config", "Spec", "Strategy", "Hyperparameters", "Tier")):
                yield self.add(module, node.id)

    def _alias(self, module: Module, name: str) -> tuple[Module, ast.expr | None]:
        if name in module.aliases:
            return module, module.aliases[name]
        source, original = module.imported.get(name, ("", ""))
        other = self.modules.get(source)
        return self._alias(other, original) if other else (module, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("areal", type=Path)
    parser.add_argument("prime_rl", type=Path)
    args = parser.parse_args()
    files = [args.areal / "areal" / "api" / "cli_args.py"]
    _write(Schema(files, qualified=False), AREAL, args.areal, "inclusionAI/AReaL", "areal")
    folder = args.prime_rl / "packages" / "prime-rl-configs" / "src" / "prime_rl" / "configs"
    schema = Schema(sorted(folder.glob("*.py")), qualified=True)
    _write(schema, PRIME_RL, args.prime_rl, "PrimeIntellect-ai/prime-rl", "prime_rl")


def _write(
    schema: Schema, kinds: dict[str, str], checkout: Path, repository: str, name: str
) -> None:
    for full in kinds.values():
        module, _, plain = full.rpartition(".")
        schema.add(schema.modules[module or "cli_args"], plain)
    command = ["git", "-C", str(checkout), "rev-parse", "--short=9", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    body = {"source": f"{repository}@{commit}", "kinds": kinds, "classes": schema.classes}
    write_json(TARGET / f"{name}_keys.json", body)


def _read(path: Path) -> Module:
    module = Module(path.stem)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            module.classes[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            if "TypeAlias" in ast.unparse(node.annotation):
                module.aliases[node.target.id] = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if "Annotated" in ast.unparse(node.value):
                module.aliases[node.targets[0].id] = node.value
        elif isinstance(node, ast.ImportFrom) and node.module:
            source = node.module.rpartition(".")[2]
            module.imported |= {n.asname or n.name: (source, n.name) for n in node.names}
    return module


if __name__ == "__main__":
    main()
