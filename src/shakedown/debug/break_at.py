"""`--break-at FILE:LINE`: a breakpoint() call before a line, without editing the file.

The call is put into the file's syntax tree on import, so it costs nothing elsewhere; a trace
function would slow down every call of the process (Python 3.11 has no other way).
"""

import ast
import importlib.machinery
from collections.abc import Collection, Mapping
from pathlib import Path
from types import CodeType

from shakedown.core.errors import UsageError

_SourceLoader = importlib.machinery.SourceFileLoader


def parse_place(text: str) -> tuple[str, int]:
    """Parse `FILE:LINE` into the file's absolute path and the line of the statement meant.

    A line without a statement (a comment, a docstring) means the next one that has one.

    Raises:
        UsageError: not in that form, not a Python file, or no statement from there on.
    """
    name, _, number = text.rpartition(":")
    if not name or not (number.isascii() and number.isdecimal() and 0 < int(number[:9]) < 10**8):
        raise UsageError(f"--break-at {text!r:.200}: expected FILE:LINE such as agent.py:42")
    path = Path(name).resolve()
    if "," in str(path):  # it is passed in an environment variable that is a list
        raise UsageError(f"--break-at {text!r:.200}: the file's path has a comma")
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--break-at {text:.200}: cannot read {path} as Python: {why}") from error
    found = _statement(tree, int(number))
    if found is None:
        raise UsageError(f"--break-at {text:.200}: {path} has no statement from line {number} on")
    return str(path), found.lineno


def break_before(source: bytes, lines: Collection[int], name: str) -> CodeType:
    """Compile a module with `sys.breakpointhook(line=N)` before the statement at each line N."""
    tree = ast.parse(source, name)
    for line in lines:
        found = _statement(tree, line)
        if found is not None:
            _insert(tree, found)
    return compile(ast.fix_missing_locations(tree), name, "exec", dont_inherit=True)


def patch_imports(places: Mapping[str, Collection[int]]) -> None:
    """Put the breakpoints into files imported (or run by `python -m`) from here on.

    Args:
        places: lines by absolute path.
    """
    original = _SourceLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        lines = places.get(str(Path(loader.path).resolve()))
        if lines is None:
            return original(loader, fullname)
        # Bypass the cache of compiled files.
        return break_before(loader.get_data(loader.path), lines, loader.path)

    _SourceLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def _statement(tree: ast.Module, line: int) -> ast.stmt | None:
    """The innermost statement that is at `line`, or the first one after it."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    usable = [node for node in statements if not _is_text(node) and not _is_future(node)]
    # Any line of a simple multi-line statement stands for it.
    around = [n for n in usable if _is_simple(n) and n.lineno <= line <= _end(n)]
    after = [node for node in usable if node.lineno >= line]
    return min(around or after, key=lambda node: (node.lineno, node.col_offset), default=None)


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _is_simple(node: ast.stmt) -> bool:
    return not hasattr(node, "body") and not isinstance(node, ast.Match)


def _is_text(node: ast.stmt) -> bool:
    """A docstring, which has to stay first."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _insert(tree: ast.Module, found: ast.stmt) -> None:
    call = ast.parse(f"__import__('sys').breakpointhook(line={found.lineno})").body[0]
    # Given another line number, so that the statement begins a new line, where a debugger stops
    # next.
    other = found.lineno - 1 or _end(found) + 1
    for node in ast.walk(call):
        if hasattr(node, "lineno"):
            ast.copy_location(node, found)
            node.lineno = node.end_lineno = other  # type: ignore[attr-defined]
    for parent in ast.walk(tree):
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and found in block:
                block.insert(block.index(found), call)
                return
