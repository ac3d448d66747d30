"""Read YAML files into a `Config`, with errors that name the key and the nearest valid one."""

import contextlib
import re
import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from shakedown.config.command import CommandStage
from shakedown.config.runtime_stage import StageConfig
from shakedown.config.schema import STAGE_KINDS, Config
from shakedown.config.toml_places import toml_places
from shakedown.core.errors import ConfigError, did_you_mean
from shakedown.core.files import write_text

WORKFLOW_CONFIG = Path("config/config.yaml")  # what the Snakefile lays under every overlay


def load_config(*paths: Path) -> Config:
    """Read YAML files, each merged over the ones before it and over what `layers` puts below.

    Raises:
        ConfigError: a file is missing or is not YAML; a key is unknown, missing or wrong.
    """
    below = layers(*paths)
    where = " + ".join(str(path) for path in below)
    return parse_config(_merged(below), where=where, paths=below)


def layers(*paths: Path) -> tuple[Path, ...]:
    """The files, over config/config.yaml of the working directory unless they are a whole run.

    So an overlay means the same to every command as to `snakemake --configfile`.

    Raises:
        ConfigError: a file is missing or is not YAML.
    """
    base = WORKFLOW_CONFIG
    # The base may be given itself, also by another path to the same file.
    if base in paths or not base.is_file() or any(p.exists() and p.samefile(base) for p in paths):
        return paths
    return paths if _is_whole(_merged(paths)) else (base, *paths)


def _merged(paths: Sequence[Path]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for path in paths:
        merged = merge(merged, read_yaml(path))
    return merged


def _is_whole(body: Mapping[str, Any]) -> bool:
    """Whether it has stages with all of their keys, whatever their values."""
    try:
        Config.model_validate(_tuples(dict(body)))
    except ValidationError as error:
        return all(fault["type"] != "missing" for fault in error.errors())
    return bool(body.get("stages"))


def parse_config(
    body: Mapping[str, Any], *, where: str = "config", paths: Sequence[Path] = ()
) -> Config:
    """Validate a mapping; `paths`: the files that it came from, to locate faults.

    Raises:
        ConfigError: lists every fault with its key, what was given and what is valid.
    """
    try:
        return _in_order(Config.model_validate(_tuples(dict(body))))
    except ValidationError as error:
        written = KeyLocations(paths)
        given = error.errors()
        faults = [_explain(fault, written) for fault in given[:_MOST_FAULTS]]
        faults += [f"and {len(given) - _MOST_FAULTS} more"] if len(given) > _MOST_FAULTS else []
        listed = "\n  ".join(faults)
        lint = f", then: shakedown lint {shlex.join(map(str, paths))}" if paths else ""
        raise ConfigError(
            f"{where}: {len(given)} fault(s)\n  {listed}",
            hint=f"fix the file{lint}",
        ) from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings key by key, as `snakemake --configfile` does; other values are replaced."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        result[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return result


def dump_config(config: Config) -> str:
    """The resolved form: every key with its value, loadable again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def write_resolved(config: Config, path: Path) -> None:
    """Write the resolved form atomically."""
    write_text(path, dump_config(config))


def read_yaml(path: Path, *, shared: bool = False) -> Mapping[str, Any]:
    """The mapping of one file.

    Args:
        shared: the caller bounds its own walk through aliases of aliases.

    Raises:
        ConfigError: missing, not YAML, or not a mapping.
    """
    try:
        body = _constructed(path.read_text(encoding="utf-8"), shared)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # also no UTF-8, and dates that do not exist
        raise ConfigError(f"{path} is not YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read: nested too deeply") from error
    if not isinstance(body, Mapping):
        raise ConfigError(f"{path}: expected a mapping of keys, got {type(body).__name__}")
    return body


_MOVED = {"grpo.drift.limits": "consistency.limits"}  # the end of an earlier key -> the one now
_MOST_FAULTS = 50  # that are shown
_MOST_NODES = 20_000  # also with what aliases and `<<` stand for, which 1 kB can make 10^30
_LONGEST_NUMBER = 1000  # characters; Python prints none of more than 4300 digits
_LONGEST_KEY = 200


def _constructed(text: str, shared: bool) -> Any:
    """The value of the text, after a check that its readers can walk through its size."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is not None and not shared and _size(node, {}) > _MOST_NODES:
            raise _refused(f"its aliases make more than {_MOST_NODES} values of it")
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Nodes of a tree in which each alias is written out: too many where it contains itself."""
    if id(node) not in known:
        known[id(node)] = _MOST_NODES + 1  # until it is counted
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        known[id(node)] = min(_MOST_NODES + 1, 1 + sum(_size(part, known) for part in parts))
    return known[id(node)]


def _short(node: yaml.ScalarNode, what: str, most: int) -> None:
    if (length := len(node.value)) > most:
        found = f"the {what} {node.value[:20]}... has {length} characters: expected at most {most}"
        raise _refused(found, node.start_mark)


def _refused(why: str, mark: yaml.Mark | None = None) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, why, mark)


class _Loader(yaml.SafeLoader):
    """Enforces YAML's own rule that a key occurs once in a mapping, which PyYAML does not.

    Numbers and keys are bounded in length: converting very long ones takes forever.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0

    def _count(self, more: int) -> None:
        self._nodes += more
        if self._nodes > _MOST_NODES:
            raise _refused(f"it has more than {_MOST_NODES} keys and values, with those of `<<`")

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._count(1)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for each in merged:
                    if isinstance(each, yaml.MappingNode) and each is not node:
                        self.flatten_mapping(each)
                        self._count(len(each.value))
        super().flatten_mapping(node)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.tag in (
            "tag:yaml.org,2002:int",
            "tag:yaml.org,2002:float",
        ):
            _short(node, "number", _LONGEST_NUMBER)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        # Only keys that are written here: what `<<` brings in may be overruled.
        for key in (key for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"):
            _short(key, "key", _LONGEST_KEY)
            if key.value in seen:
                raise _refused(f"the key {key.value!r:.40} occurs twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _tuples(body: dict[str, Any]) -> dict[str, Any]:
    """The body with tuples: YAML has none, so `betas` is a list, which strict mode refuses."""
    stages = body.get("stages")
    if not isinstance(stages, Mapping):
        return body
    fixed: dict[str, Any] = {}
    for name, stage in stages.items():
        fixed[name] = stage
        optimizer = stage.get("optimizer") if isinstance(stage, Mapping) else None
        if isinstance(optimizer, Mapping) and isinstance(optimizer.get("betas"), list):
            tupled = {**optimizer, "betas": tuple(optimizer["betas"])}
            fixed[name] = {**stage, "optimizer": tupled}
    return {**body, "stages": fixed}


def _in_order(config: Config) -> Config:
    """The config with the stages of `order`, in its order, which merging overlays loses."""
    stages = {name: config.stages[name] for name in config.order or config.stages}
    return config.model_copy(update={"stages": stages})


_MAX_KEYS = 10_000  # aliases can make a short file long without end
_MAX_DEPTH = 12


class KeyLocations:
    """Where the keys of a config are written. The last of several files counts."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the files, which were read before; one that is no longer readable is skipped."""
        self._places: dict[tuple[str, ...], str] = {}
        self._files: dict[tuple[str, ...], int] = {}
        for number, path in enumerate(paths):
            self._lists: set[int] = set()
            with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
                text = path.read_text(encoding="utf-8")
                if path.suffix == ".toml":
                    for key, (line, column) in toml_places(text).items():
                        self._places[key] = f"{path}:{line}:{column}"
                else:
                    self._read(path, number, yaml.compose(text, _Loader), ())

    def _read(
        self, path: Path, number: int, node: yaml.Node | None, above: tuple[str, ...]
    ) -> None:
        if len(above) > _MAX_DEPTH:
            return
        if isinstance(node, yaml.SequenceNode) and id(node) not in self._lists:
            self._lists.add(id(node))  # aliases can nest one list in itself without end
            for index, item in enumerate(node.value):
                self._read(path, number, item, (*above, str(index)))
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            if len(self._places) >= _MAX_KEYS:
                return
            if not isinstance(key, yaml.ScalarNode):
                continue
            mark = key.start_mark
            here = (*above, str(key.value))
            self._places[here] = f"{path}:{mark.line + 1}:{mark.column + 1}"
            self._files[here] = number
            self._read(path, number, value, here)

    def at(self, key: str) -> str:
        """`FILE:LINE:COLUMN` of a dotted key, or of the nearest section around it; else empty."""
        parts = tuple(key.split("."))
        found = (self._places.get(parts[:end]) for end in range(len(parts), 0, -1))
        return next((place for place in found if place), "")

    def below(self, section: str) -> list[str]:
        """Names of the keys of a section at the top, in any of the files."""
        return [key[1] for key in self._places if len(key) > 1 and key[:-1] == (section,)]

    def is_over(self, first: str, second: str) -> bool:
        """Whether the first of two dotted keys is written in a later file than the second."""
        files = [self._files.get(tuple(key.split(".")), -1) for key in (first, second)]
        return files[0] > files[1]


def _explain(fault: Any, written: KeyLocations) -> str:
    full = [str(part) for part in fault["loc"]]
    location = [part for part in full if part not in STAGE_KINDS]
    key = ".".join(location)
    place = written.at(key)
    begin = f"{place}: {key or 'config'}" if place else key or "config"
    if fault["type"] == "extra_forbidden":
        if now := next((now for old, now in _MOVED.items() if key.endswith(old)), ""):
            return f"{begin}: removed: write {now}"
        valid = _valid_keys(full[:-1])
        return f"{begin}: unknown key{did_you_mean(location[-1], valid)}; valid: {', '.join(valid)}"
    if fault["type"] == "missing":
        return f"{begin}: missing"
    given = fault["input"]
    told = f"{begin}: {fault['msg']}, got {given!r:.120}"
    if fault["type"] == "literal_error" and location[-1] == "algorithm":
        return f"{begin}: expected sft, grpo or command, got {given!r:.120}"
    if given is None and location[:1] == ["stages"] and len(location) == len(("stages", "name")):
        return f"{told}; to leave a stage out, name the others in `order`"
    return told + _read_otherwise(given, fault["type"])


# Numbers for people that YAML 1.1 takes for text: it wants a point, and a sign after the e.
_NEARLY_A_NUMBER = re.compile(r"[-+]?\d[\d_]{0,30}(?:\.\d{0,30})?[eE][-+]?\d{1,4}")


def _read_otherwise(given: object, fault: str) -> str:
    """Advice for a value that YAML reads as another one than meant; `fault`: pydantic's type."""
    if fault in ("literal_error", "string_type") and isinstance(given, bool):
        return "; YAML reads on, off, yes and no as true and false: put it in quotes"
    if fault == "string_type" and isinstance(given, int | float):
        return "; YAML reads it as a number (3:5 as 3 x 60 + 5): put it in quotes"
    if fault == "float_type" and isinstance(given, str) and _NEARLY_A_NUMBER.fullmatch(given):
        mantissa, _, power = given.lower().partition("e")
        point = "" if "." in mantissa else ".0"
        sign = "" if power[0] in "+-" else "+"
        return f"; YAML reads it as text: write {mantissa}{point}e{sign}{power}"
    return ""


def _valid_keys(location: list[str]) -> list[str]:
    """Names of the keys of the section at `location`."""
    section: Any = Config
    for part in location:
        section = _section(section, part)
        if section is None:
            return []
    return list(section.model_fields)


def _section(section: Any, part: str) -> Any:
    """The Section class under key `part`; a mapping's value class stands for any key."""
    if part in STAGE_KINDS:
        return (StageConfig, CommandStage)[STAGE_KINDS.index(part)]
    if typing.get_origin(section) is dict:
        return typing.get_args(section)[1]
    annotation = section.model_fields[part].annotation
    # `GrpoConfig | None`: the section stands first.
    if isinstance(annotation, types.UnionType):
        annotation = typing.get_args(annotation)[0]
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section or typing.get_origin(annotation) is dict else None
