"""scripts/install_python.sh in a small project of its own, against indexes on this machine."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import files
from pathlib import Path
from threading import Thread

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "{name}"
version = "1"
"""
BACKEND = """
import shutil
def build_editable(folder, *_):
    return shutil.copy("{name}-1-py3-none-any.whl", folder).rpartition("/")[2]
"""


def make_wheel(folder: Path, name: str, version: str, source: str, build: str = "") -> Path:
    """A wheel with the one module `name`; of two with one version pip prefers a higher `build`."""
    folder.mkdir(parents=True, exist_ok=True)
    tag = f"{version}-{build}" if build else version
    path = folder / f"{name}-{tag}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        _write_info(wheel, name, version)
    return path


def make_wheel_of_pip(folder: Path, version: str) -> Path:
    """The pip that runs here, called another version, so that it replaces the one of a venv."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"pip-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file in files("pip") or []:
            if file.parts[0] == "pip" and file.suffix != ".pyc":
                wheel.write(str(file.locate()), str(file))
        _write_info(wheel, "pip", version)
    return path


def _write_info(wheel: zipfile.ZipFile, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    wheel.writestr(
        f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    wheel.writestr(f"{info}/RECORD", "")


def lock_row(wheel: Path) -> str:
    """The wheel's row of a lock."""
    name, version = wheel.name.split("-")[:2]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"{name}=={version} \\\n    --hash=sha256:{digest}\n"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """The folder's listing is the index page; nobody reads who asked for it."""


@contextmanager
def serve(root: Path) -> Iterator[str]:
    """The address of a server whose folders are indexes: root/INDEX/PACKAGE/*.whl."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=root)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def make_project(root: Path, *wheels: Path) -> Path:
    """A project that needs these wheels alone, and its executor."""
    shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "locks").mkdir()
    (root / "locks" / "cpu.txt").write_text("".join(map(lock_row, wheels)), encoding="utf-8")
    for folder, name in ((root, "tiny"), (root / "executor", "tiny_executor")):
        make_wheel(folder, name, "1", "")
        (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name), encoding="utf-8")
        (folder / "backend.py").write_text(BACKEND.format(name=name), encoding="utf-8")
    return root


def install(
    project: Path, *arguments: str, index: str = "", fallback: str = "", **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run the script; `settings` are more variables of its environment."""
    pip = {"PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        [project / "scripts" / "install_python.sh", *arguments],
        cwd="/",
        env=kept | pip | {"TORCH_CPU_INDEX": fallback, "PYTHON": sys.executable} | settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def installed(project: Path) -> list[Path]:
    """The stamps of finished installations."""
    return list((project / ".venv").glob(".installed-*"))


def value_in_torch(project: Path) -> str:
    """`build` of the module torch that .venv holds."""
    asked = [str(project / ".venv/bin/python"), "-c", "import torch; print(torch.build)"]
    return subprocess.check_output(asked, text=True).strip()
