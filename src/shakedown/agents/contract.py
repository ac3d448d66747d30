"""The agent contract: load a class, check it without running it, judge what it returned.

An agent is any class with `async def run(self, data, **extra_kwargs)` that returns a reward, or
a dict of rewards by completion id. It is never changed, wrapped or subclassed.
"""

import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from pathlib import Path
from types import ModuleType

from shakedown.errors import UsageError, did_you_mean

# What every agent is given by keyword; AReaL gives the same three.
EXTRA_KWARGS = ("base_url", "api_key", "http_client")

Reward = float | dict[str, float]


class BadReturnError(ValueError):
    """An agent returned something that is no reward."""


class AgentExitError(Exception):
    """An agent called sys.exit."""


def load_agent(target: str) -> type:
    """Import `package.module:Class` or `path/to/file.py:Class` and check the contract.

    Raises:
        UsageError: no such module or class, an import that fails, a `run` that is not async or
            does not take the keyword arguments, a class that cannot be built.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise UsageError(
            f"agent target {target!r}: expected package.module:Class or path/to/file.py:Class",
            hint=_colon_hint(target),
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    agent = getattr(module, name, None)
    if agent is None:
        classes = _classes(module)
        raise UsageError(
            f"{place} has no {name!r}{did_you_mean(name, classes)}; "
            f"classes there: {', '.join(classes) or 'none'}"
        )
    if not inspect.isclass(agent):
        raise UsageError(f"{target} is a {type(agent).__name__}, expected a class with `run`")
    check_contract(agent, target)
    return agent


def check_contract(agent: type, target: str) -> None:
    """Check `run` and build one instance, without calling `run`.

    Raises:
        UsageError: says what about the class breaks the contract.
    """
    run = getattr(agent, "run", None)
    if run is None:
        methods = [name for name in vars(agent) if not name.startswith("_")]
        raise UsageError(
            f"{target} has no `run`{did_you_mean('run', methods)}",
            hint="give the class: async def run(self, data, **extra_kwargs)",
        )
    if not inspect.iscoroutinefunction(run):
        kind = "an async generator" if inspect.isasyncgenfunction(run) else "not async"
        raise UsageError(
            f"{target}: `run` is {kind}, expected a coroutine that returns a reward",
            hint="write: async def run(self, data, **extra_kwargs)",
        )
    try:
        instance = agent()
    except Exception as error:  # the user's constructor may raise anything
        raise UsageError(
            f"{target} cannot be built without arguments: {type(error).__name__}: {error}"
            f" ({last_frame(error)})",
            hint="give every argument of __init__ a default",
        ) from error
    try:
        inspect.signature(instance.run).bind({}, **dict.fromkeys(EXTRA_KWARGS))
    except TypeError as error:
        raise UsageError(
            f"{target}: `run{inspect.signature(instance.run)}` cannot be called with data and "
            f"the keyword arguments {', '.join(EXTRA_KWARGS)}: {error}",
            hint="write: async def run(self, data, **extra_kwargs)",
        ) from error


def accepts_model(agent: type) -> bool:
    """Whether `run` takes the keyword `model`: the name that the server answers to."""
    parameters = inspect.signature(agent.run).parameters.values()  # type: ignore[attr-defined]
    kinds = {parameter.kind for parameter in parameters}
    named = {parameter.name for parameter in parameters}
    return inspect.Parameter.VAR_KEYWORD in kinds or "model" in named


def judge_return(value: object) -> Reward:
    """Return the reward as a float, or as a dict of floats by completion id.

    Real numbers of any kind count (int, Fraction, numpy's scalars).

    Raises:
        BadReturnError: bool, None, text, NaN, infinity, arrays, an empty dict, a key that is no id.
    """
    if not isinstance(value, dict):
        return _number(value, "the reward")
    if not value:
        raise BadReturnError("an empty dict rewards no completion; return {completion.id: reward}")
    for key in value:
        if not isinstance(key, str) or not key:
            raise BadReturnError(f"key {key!r:.60} of the reward dict is no completion id (text)")
    return {key: _number(item, f"the reward of {key!r:.60}") for key, item in value.items()}


def last_frame(error: BaseException, inside: str = "") -> str:
    """`file:line in function: code` of the innermost frame of the user's own code.

    Args:
        error: an exception with its traceback.
        inside: prefer frames of this file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1])
    own = [
        f
        for f in frames
        if not f.filename.startswith((package, "<frozen")) and "site-packages" not in f.filename
    ]
    chosen = [f for f in frames if inside and f.filename == inside] or own or list(frames)
    if not chosen:
        return ""
    frame = chosen[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"


def _number(value: object, what: str) -> float:
    name = type(value).__name__
    if value is None:
        raise BadReturnError(f"{what} is None: does every branch of `run` end in `return reward`?")
    if isinstance(value, bool) or name in ("bool", "bool_"):
        raise BadReturnError(f"{what} is a bool ({value}): return float(...) to say what is meant")
    if not isinstance(value, numbers.Real):
        advice = "return value.item()" if hasattr(value, "item") else "return a number"
        raise BadReturnError(f"{what} is a {name} ({value!r:.60}): {advice}")
    number = float(value)
    if not math.isfinite(number):
        raise BadReturnError(f"{what} is {number}: one such value spoils a whole batch's advantage")
    return number


def _load_module(name: str) -> ModuleType:
    _prepend_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"no module {error.name!r} (from the target {name!r})",
                hint="run from the folder that holds it, or give path/to/file.py:Class",
            ) from error
        raise _import_failed(name, error) from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise _import_failed(name, error) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(f"no file {path}{did_you_mean(path.name, siblings)}")
    path = path.resolve()
    _prepend_path(path.parent)
    name = f"shakedown_agent_{path.stem}"  # a user's `types.py` must not replace Python's
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        del sys.modules[name]
        raise _import_failed(str(path), error) from error
    return module


def _import_failed(name: str, error: BaseException) -> UsageError:
    return UsageError(
        f"importing {name} failed: {type(error).__name__}: {error} ({last_frame(error)})",
        hint="keep what runs the agent under `if __name__ == '__main__':`",
    )


def _prepend_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _classes(module: ModuleType) -> list[str]:
    return [
        name
        for name, item in vars(module).items()
        if inspect.isclass(item) and item.__module__ == module.__name__
    ]


def _colon_hint(target: str) -> str:
    module, _, name = target.rpartition(".")
    return f"did you mean {module}:{name} ?" if module and name[:1].isupper() else ""
