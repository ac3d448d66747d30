"""Who can read and write what a run makes, whatever the umask and the folder around."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shakedown.config import load_config
from shakedown.core.files import write_json
from shakedown.core.paths import RunPaths
from tests.command import shakedown
from tests.security.neighbour import open_to_others

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("umask", [0o002, 0o077, 0o000])
def test_results_are_closed_to_others_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    out = tmp_path / "results" / "demo" / "preflight"

    done = shakedown("preflight", "--out", out, "--nodes", 1, "--min-free-disk-gb", 0, umask=umask)

    assert done.returncode in (0, 1), done.stderr
    assert (out / "verdict.json").is_file()
    assert open_to_others(tmp_path / "results", 0o077) == []


def test_group_reads_opens_results_to_the_groups_reading_alone(tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text(f"results: {tmp_path}/results\ngroup_reads: true\n")
    out = tmp_path / "results" / "demo" / "preflight"

    shakedown("preflight", "--config", config, "--out", out, umask=0o077)

    assert open_to_others(tmp_path / "results", 0o027) == []
    assert stat.S_IMODE((tmp_path / "results").stat().st_mode) == 0o750
    assert stat.S_IMODE((out / "verdict.json").stat().st_mode) == 0o640


def test_an_access_list_of_the_project_folder_opens_no_results(tmp_path: Path) -> None:
    """`setfacl -d -m group:project:rwx` on a project folder outranks every umask."""
    project = tmp_path / "project"
    project.mkdir()
    # posix_acl_xattr.h: version 2, then entries of tag, permissions, id; owner, a group, mask ...
    entries = [(1, 7, -1), (4, 7, -1), (8, 7, 4242), (16, 7, -1), (32, 0, -1)]
    packed = b"\x02\x00\x00\x00" + b"".join(
        tag.to_bytes(2, "little") + bits.to_bytes(2, "little") + (who % 2**32).to_bytes(4, "little")
        for tag, bits, who in entries
    )
    try:
        os.setxattr(project, "system.posix_acl_default", packed)
    except OSError as error:
        pytest.skip(f"no access lists here: {error}")
    (project / "without").mkdir(0o777)
    assert (project / "without").stat().st_mode & 0o020

    write_json(project / "results" / "demo" / "state.json", {})
    (project / "results" / "demo" / "of another program").mkdir()

    assert open_to_others(project / "results", 0o020) == []


def test_the_workflow_makes_closed_results_and_refuses_open_ones(tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    agent = Path(__file__).parents[2] / "config" / "examples" / "my_agent.py"
    config.write_text(
        f"results: {tmp_path}/results\npreflight: {{min_free_disk_gb: 0.0}}\n"
        f"agents: {{target: '{agent}:MyAgent'}}\n"
    )
    target = RunPaths(load_config(config).paths.root).preflight.verdict

    first = snakemake(config, target)
    assert target.is_file(), first.stdout + first.stderr
    assert open_to_others(tmp_path / "results", 0o077) == []
    # Files there, whose modes Snakemake sets, are in closed folders.
    writable = open_to_others(tmp_path / ".snakemake", 0o022)
    assert [path for path in writable if Path(path).is_dir()] == []
    (tmp_path / "results").chmod(0o775)
    target.unlink()
    second = snakemake(config, target)

    assert second.returncode != 0
    assert f"{tmp_path}/results can be written by its group" in second.stdout + second.stderr
    assert not target.exists()


def snakemake(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Beside a checkout, so that its `.snakemake` is not shared with other runs."""
    snakefile = REPOSITORY / "workflow" / "Snakefile"
    command = [sys.executable, "-m", "snakemake", "--snakefile", snakefile, "--cores", "1"]
    base = REPOSITORY / "config" / "config.yaml"
    return subprocess.run(
        [*map(str, command), "--configfile", str(base), str(config), "--", str(target)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=config.parent,
        umask=0o002,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
