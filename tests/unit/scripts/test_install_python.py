"""scripts/install_python.sh against package indexes that lack the CPU build, or do not answer."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.install_script import (
    install,
    installed,
    make_project,
    make_wheel,
    make_wheel_of_pip,
    serve,
    value_in_torch,
)

pytestmark = pytest.mark.slow  # each `python -m venv` takes seconds


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two indexes: cuda/ as PyPI, and cpu/ as PyTorch's; and pip/, with a newer pip as well."""
    root = tmp_path_factory.mktemp("indexes")
    make_wheel(root / "cuda" / "torch", "torch", "2.13.0", "build = 'cuda'")
    make_wheel(root / "cpu" / "torch", "torch", "2.13.0+cpu", "build = 'cpu'")
    (root / "pip").mkdir()
    (root / "pip" / "torch").symlink_to(root / "cpu" / "torch")
    make_wheel_of_pip(root / "pip" / "pip", "99.0")
    return root


@pytest.fixture(scope="module")
def indexes(wheels: Path) -> Iterator[str]:
    """The address of the indexes."""
    with serve(wheels) as address:
        yield address


@pytest.fixture(scope="module")
def closed() -> Iterator[str]:
    """An index that refuses connections: the port is bound, and nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://user:secret@127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def project(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that needs torch alone, and its executor."""
    (torch,) = wheels.glob("cpu/torch/*.whl")
    return make_project(tmp_path_factory.mktemp("project"), torch)


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
        (["cpu"], "whl/cpu", "TORCH_CPU_INDEX is 'whl/cpu': expected a https"),
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
    assert value_in_torch(project) == "cpu"
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
    assert value_in_torch(project) == "cpu"


def test_venv_that_a_killed_call_left_half_made_is_made_again(project: Path, indexes: str) -> None:
    install(project, index=f"{indexes}/cpu")
    (project / ".venv" / "bin" / "activate").unlink()

    done = install(project, index=f"{indexes}/cpu")

    assert done.returncode == 0, done.stderr
    assert "making .venv" in done.stdout
    assert (project / ".venv" / "bin" / "activate").exists()
    assert value_in_torch(project) == "cpu"


@pytest.mark.exhaustive
def test_pip_that_a_killed_call_left_half_replaced_is_made_again_with_its_venv(
    wheels: Path, indexes: str, tmp_path: Path
) -> None:
    project = make_project(tmp_path / "project", *wheels.glob("pip/*/*.whl"))
    first = install(project, index=f"{indexes}/pip")
    packages = next((project / ".venv").glob("lib/python3*/site-packages"))
    (packages / "pip" / "_internal" / "commands" / "install.py").unlink()
    (packages / "pip-99.0.dist-info" / "INSTALLER").unlink()
    installed(project)[0].unlink()

    done = install(project, index=f"{indexes}/pip")

    assert first.returncode == 0, first.stderr
    assert done.returncode == 0, done.stderr
    assert "making .venv" in done.stdout
    assert (packages / "pip-99.0.dist-info" / "INSTALLER").exists()


def test_venv_of_another_tool_without_pip_is_kept_and_named(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    python = root / ".venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)

    done = install(root)

    assert done.returncode == 3
    assert ".venv has no pip, so another tool made it" in done.stderr
    assert python.exists()
