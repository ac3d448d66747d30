"""Names, choices and defaults that a version of AReaL or prime-rl knows, read from its own source.

The version is the one that is named, the checkout that the config lies in, or the package installed
for the user's Python. Its files are parsed: nothing of it is imported or run.
"""

import ast
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from os import environ
from pathlib import Path
from urllib.parse import unquote, urlparse

from shakedown.core.errors import UsageError

ANYTHING = "*"  # a class under which any key may stand, and the key of a class that takes any
UNREAD = object()  # the default of a key whose source does not show one

_MOST_BYTES = 1_000_000  # of a file; the largest of either project has 110 kB
_MOST_MODULES = 100
_MOST_HOPS = 20  # imports of imports
_PARAMETERS = re.compile(r"^( *(?:async )?(?:def|class) \w+)\[[^\]\n]*\](?=[(:])", re.MULTILINE)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Layout:
    """The location of a project's config classes.

    Args:
        roots: folders of a checkout that hold the package, in the order in which they are tried.
        marker: a file below such a folder, by which the package is known.
        installed: names under which the package is installed.
        kinds: what a file may configure -> its class.
    """

    name: str
    package: str
    roots: Sequence[str]
    marker: str
    installed: Sequence[str]
    kinds: Mapping[str, str]


@dataclass(frozen=True)
class Key:
    """One key: the classes that may stand below it, and its texts when only some are valid."""

    below: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    default: object = UNREAD


@dataclass(frozen=True)
class Schema:
    """The keys that one version of a project knows.

    `source` names the version; `lenient`: the classes that ignore a key that they do not know.
    """

    source: str
    kinds: Mapping[str, str]
    classes: Mapping[str, Mapping[str, Key]]
    lenient: frozenset[str] = frozenset()

    def find(self, classes: Sequence[str], key: str) -> list[Key]:
        """The key's entries in those of `classes` that have it; empty for an unknown one."""
        rows = [row for name in classes if (row := self.classes.get(name)) is not None]
        if ANYTHING in classes or any(ANYTHING in row and key not in row for row in rows):
            return [Key((ANYTHING,))]
        return [row[key] for row in rows if key in row]

    def below(self, classes: Sequence[str], key: str) -> list[str] | None:
        """The classes that may stand below a key of `classes`; None when no class has the key."""
        found = self.find(classes, key)
        return [name for each in found for name in each.below] if found else None

    def at(self, kind: str, key: str) -> list[str] | None:
        """The classes below a dotted key of a file of some kind; None when it is unknown."""
        below: list[str] | None = [self.kinds[kind]]
        for part in key.split(".") if key else ():
            if below is not None and not part.isdigit():  # the number of a list's element
                below = self.below(below, part)
        return below

    def default(self, kind: str, key: str, otherwise: object) -> object:
        """A key's default: `otherwise` where the source does not show it, None without the key."""
        section, _, name = key.rpartition(".")
        found = self.find(self.at(kind, section) or [], name)
        shown = [each.default for each in found if each.default is not UNREAD]
        return (shown[0] if shown else otherwise) if found else None

    def names(self, classes: Sequence[str] | None) -> list[str]:
        """The keys of all of `classes`."""
        return sorted({key for name in classes or () for key in self.classes.get(name, ())})


class UnreadableError(Exception):
    """A source is missing, or cannot be parsed; the message says which."""


def read_schema(layout: Layout, given: Path | None, configs: Sequence[Path]) -> Schema:
    """The schema of the version that the user's configs are for.

    Raises:
        UsageError: `given` holds no such package, or one that cannot be read.
        UnreadableError: none is given, and there is none, or one that cannot be read.
    """
    if given is not None:
        roots = _roots(layout, given)
        if not roots:
            expected = f"a checkout or a folder with {layout.marker}"
            raise UsageError(f"--source {given}: no {layout.name} there; expected {expected}")
        try:
            return _read(layout, roots, "")
        except UnreadableError as error:
            raise UsageError(f"--source {given}: {error}") from error
    for folder in dict.fromkeys(p for path in configs for p in path.resolve().parents):
        if roots := _roots(layout, folder):
            return _read(layout, roots, "")
    for roots, version in _installed(layout):
        return _read(layout, roots, version)
    raise UnreadableError(f"no installed {layout.name} was found")


def _roots(layout: Layout, folder: Path) -> list[Path]:
    """The folders that hold the package, of a checkout or an installation; the marker's first."""
    places = [folder / below for below in layout.roots]
    if folder.name == layout.package:
        places.append(folder.parent)
    try:
        found = [place for place in places if (place / layout.package).is_dir()]
        marked = [place for place in found if (place / layout.marker).is_file()]
    except (OSError, ValueError):  # not to be read, or a name that no path can have
        return []
    return [*marked, *(place for place in found if place not in marked)] if marked else []


def _installed(layout: Layout) -> Iterator[tuple[list[Path], str]]:
    """Roots and version of each installation, that of the user's own Python first."""
    python = shutil.which("python3") or shutil.which("python")
    prefixes = [environ.get("VIRTUAL_ENV"), environ.get("CONDA_PREFIX")]
    prefixes += [str(Path(python).parent.parent)] if python else []
    sites = [site for p in prefixes if p for site in Path(p).glob("lib/python3*/*-packages")]
    for site in dict.fromkeys([*map(str, sites), *filter(None, sys.path)]):
        found = [
            d for name in layout.installed for d in metadata.distributions(name=name, path=[site])
        ]
        version = next((each.version for each in found), "")
        places = [Path(site), *(folder for each in found for folder in _editable(each))]
        for place in places:
            if roots := _roots(layout, place):
                yield roots, version


def _editable(installed: metadata.Distribution) -> Iterator[Path]:
    """The checkout that an editable installation points to (PEP 610)."""
    try:
        text = installed.read_text("direct_url.json") or ""
    except (OSError, ValueError):  # no UTF-8
        return
    url = re.search(r'"url":\s*"(file:/[^"]+)"', text)
    if url:
        folder = Path(unquote(urlparse(url[1]).path))
        # prime-rl's configs are a package of their own, two folders into the checkout.
        yield from (folder, *list(folder.parents)[:2])


def _read(layout: Layout, roots: Sequence[Path], version: str) -> Schema:
    """The classes of one version.

    Raises:
        UnreadableError: the classes of no kind can be read.
    """
    reader = _Reader(_Package(layout.package, roots))
    try:
        kinds = {kind: full for kind, name in layout.kinds.items() if (full := reader.root(name))}
    except RecursionError:
        kinds = {}
    if not kinds:
        raise UnreadableError(
            f"{roots[0] / layout.marker} cannot be read as {layout.name}'s source"
        )
    source = f"{layout.name} {_version(roots[0], version)}"
    return Schema(source, kinds, reader.classes, frozenset(reader.lenient))


def _version(root: Path, installed: str) -> str:
    """The version or the commit that a folder is of; the folder itself where neither is told."""
    for folder in (root, *list(root.parents)[:3]):
        commit, text = _commit(folder), _text(folder / "pyproject.toml")
        stated = re.search(r'^version\s*=\s*"([^"]{1,40})"', text, re.MULTILINE)
        version = installed or (stated[1] if stated else "")
        if commit:
            return f"{version} (commit {commit[:9]})".strip()
        if version:
            return version
    return f"at {root}"


def _commit(checkout: Path) -> str:
    """The commit of a checkout, read from its `.git`; empty when it is not a checkout."""
    git = checkout / ".git"
    if pointer := re.match(r"gitdir: (.+)", _text(git)):  # a work tree or a submodule
        git = checkout / pointer[1].strip()
    head = _text(git / "HEAD").strip()
    if name := re.fullmatch(r"ref: (refs/[\w./-]+)", head):
        common = git / (_text(git / "commondir").strip() or ".")
        packed = re.search(
            rf"^([0-9a-f]{{40}}) {re.escape(name[1])}$", _text(common / "packed-refs"), re.M
        )
        head = _text(common / name[1]).strip() or (packed[1] if packed else "")
    return head if _COMMIT.fullmatch(head) else ""


def _text(path: Path) -> str:
    """The text of a file of usual size; empty for anything else."""
    try:
        found = path.stat()
        usual = stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES
        return path.read_text(encoding="utf-8") if usual else ""
    except (OSError, ValueError):  # no UTF-8, or a name that no path can have
        return ""


@dataclass
class _Module:
    """Classes and values of one file, and the origins of its imported names."""

    name: str
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    values: dict[str, ast.expr] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)

    def fill(self, body: Iterable[ast.stmt], *, package: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
                inner = (each for each in ast.walk(node) if isinstance(each, ast.ClassDef))
                for each in inner:
                    self.classes.setdefault(each.name, each)
            elif (
                isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name)
            ):
                self.values[node.target.id] = node.value
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.values[node.targets[0].id] = node.value
            elif isinstance(node, ast.If | ast.Try):  # `if TYPE_CHECKING:`, a guarded import
                self.fill(node.body, package=package)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
                self.imported |= {n.asname or n.name: (source, n.name) for n in node.names}


class _Package:
    """The modules of one package, each parsed when it is first asked for."""

    def __init__(self, name: str, roots: Sequence[Path]) -> None:
        self._name = name
        self._roots = [root.resolve() for root in roots]
        self._modules: dict[str, _Module | None] = {}

    def module(self, name: str) -> _Module | None:
        """A module of the package; None for one of another, or one that cannot be parsed."""
        if name.partition(".")[0] != self._name or len(self._modules) >= _MOST_MODULES:
            return self._modules.get(name)
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> _Module | None:
        relative = name.replace(".", "/")
        for root in self._roots:
            for path in (root / f"{relative}.py", root / relative / "__init__.py"):
                # A link out of the tree, or to nowhere, is not part of it.
                if not path.is_file() or not path.resolve().is_relative_to(root):
                    continue
                text = _text(path)
                try:
                    # Type parameters are of Python 3.12, and say nothing about keys.
                    body = ast.parse(_PARAMETERS.sub(r"\1", text)).body
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    return None
                module = _Module(name)
                inside = path.name == "__init__.py"
                module.fill(body, package=name if inside else name.rpartition(".")[0])
                return module
        return None

    def find(
        self, module: _Module, name: str, hops: int = _MOST_HOPS
    ) -> tuple[_Module, ast.ClassDef | ast.expr] | None:
        """The class or value that a name of a module stands for, imports followed."""
        found = module.classes.get(name) or module.values.get(name)
        if found is not None:
            return module, found
        source, original = module.imported.get(name, ("", ""))
        other = self.module(source) if source and hops else None
        return self.find(other, original, hops - 1) if other else None


_SCALARS = {"str", "int", "float", "bool", "bytes", "Path", "None", "Field", "timedelta"}
_SHELLS = {"list", "List", "tuple", "Tuple", "set", "Sequence", "Optional", "Union", "Annotated"}
_ENUMS = {"Enum", "StrEnum", "IntEnum"}
_PLAIN_BASES = {"object", "ABC", "Generic", "Protocol", *_ENUMS, "str", "int"}


class _Reader:
    """The classes that are reached from the kinds of a project."""

    def __init__(self, package: _Package) -> None:
        self._package = package
        self.classes: dict[str, dict[str, Key]] = {}
        self.lenient: set[str] = set()

    def root(self, name: str) -> str:
        """Put `module:Class` into `classes`; its name there, empty when it cannot be read."""
        place, _, plain = name.partition(":")
        module = self._package.module(place)
        return (self._named(module, plain) or "") if module else ""

    def _named(self, module: _Module, name: str) -> str | None:
        found = self._package.find(module, name)
        return (
            self._add(found[0], found[1]) if found and isinstance(found[1], ast.ClassDef) else None
        )

    def _add(self, module: _Module, node: ast.ClassDef) -> str:
        full = f"{module.name}.{node.name}"
        if full not in self.classes:
            keys = self.classes[full] = {}
            extra = self._extra(module, node)
            if extra == "allow":
                keys[ANYTHING] = Key()
            elif extra == "ignore":
                self.lenient.add(full)
            for owner, each in reversed(list(self._lineage(module, node))):
                keys |= self._keys(owner, each)
        return full

    def _lineage(
        self, module: _Module, node: ast.ClassDef, hops: int = _MOST_HOPS
    ) -> Iterator[tuple[_Module, ast.ClassDef]]:
        """A class, then those that it inherits from as far as the package has them."""
        yield module, node
        for base in node.bases if hops else ():
            found = self._package.find(module, _last_name(base))
            if found and isinstance(found[1], ast.ClassDef):
                yield from self._lineage(found[0], found[1], hops - 1)

    def _extra(self, module: _Module, node: ast.ClassDef) -> str:
        """How a class treats an unknown key: pydantic's `forbid`, `allow` or `ignore`."""
        result = "forbid"  # of a dataclass, which OmegaConf takes for a structure
        for owner, each in self._lineage(module, node):
            stated = [*each.keywords, *_config(each)]
            for word in stated:
                if word.arg == "extra" and isinstance(word.value, ast.Constant):
                    return str(word.value.value)
            for base in map(_last_name, each.bases):
                if self._package.find(owner, base) or base in _PLAIN_BASES:
                    continue
                # pydantic_config's BaseConfig forbids; a base that is not here may allow anything.
                result = {"BaseModel": "ignore", "BaseConfig": "forbid"}.get(base, "allow")
        return result

    def _keys(self, module: _Module, node: ast.ClassDef) -> dict[str, Key]:
        # A validator that runs before the fields are read may take more names and other values.
        early = {text for text in _early_texts(node) if text.isidentifier()}
        keys = {text: Key((ANYTHING,)) for text in early}
        for row in node.body:
            if not isinstance(row, ast.AnnAssign) or not isinstance(row.target, ast.Name):
                continue
            name = row.target.id
            if "ClassVar" in ast.dump(row.annotation):
                continue
            choices = _declared(module, self._package, row.value)
            if choices is None and name not in early:
                choices = self._choices(module, row.annotation)
            names = {name, *_aliases(row)}
            below = [*self._below(module, row.annotation)]
            if len(names) > 1 and names & early:  # an old name, whose section may be another one
                below = [ANYTHING]
            keys |= dict.fromkeys(names, Key(tuple(below), choices, _default(row.value)))
        return keys

    def _below(self, module: _Module, annotation: ast.expr) -> Iterator[str]:
        """The classes that an annotation allows below its key."""
        match annotation:
            case ast.Constant(value=str(text)):  # a forward reference
                parts = [_expression(text)]
            case ast.BinOp(left=left, right=right):
                parts = [left, right]
            case ast.Tuple(elts=parts):
                pass
            case ast.Subscript(value=outer, slice=ast.Tuple(elts=[first, *_])) if (
                _last_name(outer) == "Annotated"
            ):
                parts = [first]
            case ast.Subscript(value=outer, slice=inner) if _last_name(outer) in _SHELLS:
                parts = [inner]
            case _:
                yield from self._leaf(module, annotation)
                return
        for part in parts:
            yield from self._below(module, part)

    def _leaf(self, module: _Module, annotation: ast.expr) -> Iterator[str]:
        if isinstance(annotation, ast.Constant) or _last_name(annotation) == "Literal":
            return
        name = annotation.id if isinstance(annotation, ast.Name) else ""
        found = self._package.find(module, name)
        if found is None:  # `vf.EnvConfig` and others of another package, `dict`, `Any`
            yield from () if name in _SCALARS | _SHELLS else (ANYTHING,)
            return
        owner, node = found
        if not isinstance(node, ast.ClassDef):
            yield from self._below(owner, node)
        elif not _ENUMS & set(map(_last_name, node.bases)):
            yield self._add(owner, node)

    def _choices(self, module: _Module, annotation: ast.expr) -> tuple[str, ...] | None:
        """The texts that an annotation allows, when it allows nothing but some."""
        match annotation:
            case ast.Constant(value=None):
                return ()
            case ast.BinOp(left=left, right=right):
                both = [self._choices(module, side) for side in (left, right)]
                return None if None in both else tuple(text for side in both for text in side or ())
            case ast.Subscript(value=outer, slice=inner) if _last_name(outer) == "Literal":
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                return tuple(str(part.value) for part in parts if isinstance(part, ast.Constant))
            case ast.Name(id=name):
                found = self._package.find(module, name)
                if found and not isinstance(found[1], ast.ClassDef):
                    return self._choices(found[0], found[1])
                return _members(found[1]) if found and isinstance(found[1], ast.ClassDef) else None
            case _:
                return None


def _expression(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Name("Any")  # what cannot be read may be anything


def _last_name(node: ast.expr) -> str:
    """`Config` of `Config`, `module.Config` and `Config[T]`."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _config(node: ast.ClassDef) -> list[ast.keyword]:
    """The settings in the `model_config` of a pydantic class."""
    calls = [row for row in node.body if isinstance(row, ast.Assign)]
    names = [(name, row.value) for row in calls for name in row.targets]
    return [
        word
        for name, value in names
        if _last_name(name) == "model_config" and isinstance(value, ast.Call)
        for word in value.keywords
    ]


def _early_texts(node: ast.ClassDef) -> Iterator[str]:
    for row in node.body:
        if isinstance(row, ast.FunctionDef) and any(
            "before" in ast.dump(d) for d in row.decorator_list
        ):
            for each in ast.walk(row):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.value


def _aliases(row: ast.AnnAssign) -> Iterator[str]:
    """The other names of a pydantic field."""
    for call in (each for each in ast.walk(row) if isinstance(each, ast.Call)):
        for word in call.keywords:
            if word.arg in ("alias", "validation_alias"):
                for each in ast.walk(word.value):
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        yield each.value


def _default(value: ast.expr | None) -> object:
    if isinstance(value, ast.Call) and _last_name(value.func) in ("Field", "field"):
        stated = [word.value for word in value.keywords if word.arg == "default"]
        value = next(iter([*value.args[:1], *stated]), None)
    if isinstance(value, ast.Constant) and value.value is not ...:
        return value.value
    return UNREAD


def _declared(module: _Module, package: _Package, value: ast.expr | None) -> tuple[str, ...] | None:
    """The `choices` in the metadata of a dataclass's field."""
    for word in value.keywords if isinstance(value, ast.Call) else ():
        if word.arg != "metadata" or not isinstance(word.value, ast.Dict):
            continue
        for key, listed in zip(word.value.keys, word.value.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "choices":
                return _texts(module, package, listed)
    return None


def _texts(module: _Module, package: _Package, listed: ast.expr) -> tuple[str, ...] | None:
    """The texts of a list that stands there, or under a name."""
    if isinstance(listed, ast.Call) and _last_name(listed.func) == "list" and listed.args:
        listed = listed.args[0]
    if isinstance(listed, ast.Name):
        found = package.find(module, listed.id)
        if found is None or isinstance(found[1], ast.ClassDef):
            return None
        listed = found[1]
    if not isinstance(listed, ast.List | ast.Tuple):
        return None
    constants = [each.value for each in listed.elts if isinstance(each, ast.Constant)]
    return tuple(map(str, constants)) if len(constants) == len(listed.elts) else None


def _members(node: ast.ClassDef) -> tuple[str, ...] | None:
    """Names and values of an enumeration."""
    if not _ENUMS & set(map(_last_name, node.bases)):
        return None
    rows = [row for row in node.body if isinstance(row, ast.Assign)]
    names = [name.id for row in rows for name in row.targets if isinstance(name, ast.Name)]
    values = [row.value.value for row in rows if isinstance(row.value, ast.Constant)]
    return tuple(map(str, [*names, *values])) if len(values) == len(rows) else None
