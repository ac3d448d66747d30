"""A stand-in for nsys, which runs on no machine of the tests.

It checks the options that it is started with, runs the command, writes its report where nsys would
and ends as the command did.
"""

import os
import sys
from pathlib import Path

import pytest

_PROGRAM = """#!{python}
import subprocess, sys
assert sys.argv[1] == "profile", sys.argv
words = sys.argv[2:]
options = {{}}
while words[0].startswith("-"):
    word = words.pop(0)
    name, _, value = word.lstrip("-").partition("=")
    options[name] = value if word.startswith("--") else words.pop(0)
assert options["t"] == "cuda,nvtx" and options["capture-range"] == "cudaProfilerApi", options
child = subprocess.Popen(words)
code = child.wait()
with open(options["o"].replace("%p", str(child.pid)) + ".nsys-rep", "w") as report:
    report.write("recorded by the stand-in")
sys.exit(code)
"""


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on `nsys` is the stand-in."""
    program = folder / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(_PROGRAM.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
