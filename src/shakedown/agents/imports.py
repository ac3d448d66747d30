"""Import a user's code by `package.module:name` or `path/to/file.py:name`, with readable faults."""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from shakedown.core.errors import LaunchError, UsageError, did_you_mean
from shakedown.processes.workers import SetupFaultError, WorkerError
from shakedown.stacks.frames import owner_of


def load_target(target: str, *, what: str, name: str) -> tuple[ModuleType, str]:
    """Import the module named before the colon.

    Args:
        target: `package.module:name`, searched from the current folder, or `path/to/file.py:name`.
        what: for messages, such as `agent target`.
        name: for messages, what stands after the colon, such as `Class`.

    Returns:
        The module, and the name after the colon; whether the module has it is not checked.

    Raises:
        UsageError: not of this form, no such module or file, or an import that fails.
    """
    place, separator, attribute = target.rpartition(":")
    if not separator or not place or not attribute:
        raise UsageError(
            f"{what} {target!r}: expected package.module:{name} or path/to/file.py:{name}",
            hint=_colon_hint(target),
        )
    return (_load_file(Path(place)) if place.endswith(".py") else _load_module(place)), attribute


@contextlib.contextmanager
def worker_errors() -> Iterator[None]:
    """Show the user why a worker process that runs their code could not be started.

    Raises:
        UsageError: the code cannot be used.
        LaunchError: the process could not be started.
    """
    try:
        yield
    except SetupFaultError as error:
        raise UsageError(str(error)) from error
    except WorkerError as error:
        raise LaunchError(str(error)) from error


def last_frame(error: BaseException, inside: str = "") -> str:
    """`file:line in function: code` of the innermost frame of the user's own code.

    Args:
        error: an exception with its traceback.
        inside: prefer frames of this file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    chosen = (
        [f for f in frames if inside and f.filename == inside]
        or [f for f in frames if owner_of(f.filename) == "user"]
        # An agent may be installed: then a library's frame is the user's own.
        or [f for f in frames if owner_of(f.filename) == "library"]
        or list(frames)
    )
    if not chosen:
        return ""
    frame = chosen[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"


def _load_module(name: str) -> ModuleType:
    _prepend_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"no module {error.name!r} (from the target {name!r})",
                hint="run from the folder that holds it, or give path/to/file.py:NAME",
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
        hint="keep what runs it under `if __name__ == '__main__':`",
    )


def _prepend_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _colon_hint(target: str) -> str:
    module, _, name = target.rpartition(".")
    return f"did you mean {module}:{name} ?" if module and name[:1].isupper() else ""
