"""scripts/install_python.sh against package indexes that lack the CPU build, or do not answer."""

import os
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
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

pytestmark = pytest.mark.slow  # each `python -m venv` takes seconds


def make_wheel(folder: Path, name: str, version: str, source: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """The folder's listing is the index page; nobody reads who asked for it."""


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An address with /cuda/, an index as PyPI, and /cpu/, one as PyTorch's."""
    root = tmp_path_factory.mktemp("indexes")
    make_wheel(root / "cuda" / "torch", "torch", "2.13.0", "build = 'cuda'")
    make_wheel(root / "cpu" / "torch", "torch", "2.13.0+cpu", "build = 'cpu'")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=root)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def closed() -> Iterator[str]:
    """An index that refuses connections: the port is bound, and nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://user:secret@127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that needs torch alone, and its executor."""
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "constraints.txt").write_text("torch==2.13.0\n", encoding="utf-8")
    for folder, name in ((root, "tiny"), (root / "executor", "tiny_executor")):
        make_wheel(folder, name, "1", "")
        (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name), encoding="utf-8")
        (folder / "backend.py").write_text(BACKEND.format(name=name), encoding="utf-8")
    return root


def install(
    project: Path, *arguments: str, index: str = "", fallback: str = ""
) -> subprocess.CompletedProcess[str]:
    pip = {"PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        [project / "scripts" / "install_python.sh", *arguments],
        cwd="/",
        env=kept | pip | {"TORCH_CPU_INDEX": fallback, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def installed(project: Path) -> list[Path]:
    return list((project / ".venv").glob(".installed-*"))


def build_of_torch(project: Path) -> str:
    asked = [str(project / ".venv/bin/python"), "-c", "import torch; print(torch.build)"]
    return subprocess.check_output(asked, text=True).strip()


def test_index_that_does_not_answer_is_not_taken_for_one_without_a_cpu_build(
    project: Path, closed: str, indexes: str
) -> None:
    done = install(project, index=closed, fallback=f"{indexes}/cpu")

    assert done.returncode == 3
    assert "a package index cannot be read: http://127.0.0.1" in done.stderr
    assert "Connection refused" in done.stderr
    assert "no CPU build" not in done.stdout
    assert not installed(project)


def test_fall_back_that_does_not_answer_is_named_without_its_password(
    project: Path, closed: str, indexes: str
) -> None:
    done = install(project, index=f"{indexes}/cuda", fallback=closed)

    assert done.returncode == 3
    assert "no CPU build of torch" in done.stdout
    assert "a package index cannot be read: http://127.0.0.1" in done.stderr
    assert "TORCH_CPU_INDEX" in done.stderr
    assert "secret" not in done.stdout + done.stderr
    assert not installed(project)


def test_fall_back_without_the_pinned_version_is_said_to_have_none(
    project: Path, indexes: str
) -> None:
    done = install(project, index=f"{indexes}/cuda", fallback=f"{indexes}/cuda")

    assert done.returncode == 3
    assert f"{indexes}/cuda has no torch==2.13.0+cpu for Python" in done.stderr
    assert not installed(project)


@pytest.mark.parametrize(
    ("arguments", "fallback", "message"),
    [
        (["gpu"], "", "unknown flavour 'gpu': expected cpu, cuda or sglang"),
        (["cpu"], "whl/cpu", "TORCH_CPU_INDEX is 'whl/cpu': expected a http"),
    ],
)
def test_wrong_request_is_refused_before_anything_is_made(
    project: Path, arguments: list[str], fallback: str, message: str
) -> None:
    done = install(project, *arguments, fallback=fallback)

    assert done.returncode == 2
    assert message in done.stderr


def test_cpu_build_comes_from_the_fall_back_and_a_second_call_does_nothing(
    project: Path, indexes: str, closed: str
) -> None:
    first = install(project, index=f"{indexes}/cuda", fallback=f"{indexes}/cpu")
    second = install(project, index=closed, fallback=closed)

    assert first.returncode == 0, first.stderr
    assert f"asking {indexes}/cpu" in first.stdout
    assert build_of_torch(project) == "cpu"
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")


def test_package_that_a_killed_call_left_half_there_is_installed_again(
    project: Path, indexes: str
) -> None:
    install(project, index=f"{indexes}/cpu")
    packages = next((project / ".venv").glob("lib/python3*/site-packages"))
    (packages / "torch.py").unlink()
    (packages / "torch-2.13.0+cpu.dist-info" / "INSTALLER").unlink()
    installed(project)[0].unlink()

    done = install(project, index=f"{indexes}/cpu")

    assert done.returncode == 0, done.stderr
    assert build_of_torch(project) == "cpu"


def test_venv_that_a_killed_call_left_half_made_is_made_again(project: Path, indexes: str) -> None:
    install(project, index=f"{indexes}/cpu")
    (project / ".venv" / "bin" / "activate").unlink()

    done = install(project, index=f"{indexes}/cpu")

    assert done.returncode == 0, done.stderr
    assert "making .venv" in done.stdout
    assert (project / ".venv" / "bin" / "activate").exists()
    assert build_of_torch(project) == "cpu"
