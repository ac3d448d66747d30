"""Preflight under real trouble: full and unwritable disks, dead workers, hostile surroundings."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shakedown.cluster.nodes import free_port
from shakedown.core.verdict import Verdict, read_verdict

HERE = socket.gethostname()
REPOSITORY = Path(__file__).resolve().parents[2]


def run(
    out: Path, *more: str, cwd: Path | None = None, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = [sys.executable, "-P", "-m", "shakedown.cli", "preflight", "--out", str(out), *more]
    return subprocess.run(
        [*prefix, *command], cwd=cwd, env=outside, capture_output=True, text=True, check=False
    )


def verdict_of(out: Path) -> Verdict:
    return read_verdict(out / "verdict.json")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


# One of each kind: a fact, a probe that does not answer, the network. Which check finds which fault
# is in tests/unit/preflight/test_probe.py.
@pytest.mark.parametrize(
    ("fault", "code", "check"),
    [
        ("gpu_missing", 1, "gpus"),
        ("probe_hang", 3, "memory"),
        pytest.param("gloo_dead", 1, "network_worker", marks=pytest.mark.slow),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (
                ("no_disk", 1, "files"),
                ("low_shm", 1, "shm"),
                ("low_limits", 1, "limits"),
                ("version_skew", 1, "environment"),
                ("clock_skew", 1, "clock"),
                ("name_resolution", 1, "names"),
                ("port_busy", 1, "ports"),
                ("invisible_file", 1, "visibility"),
                ("model_unreadable", 1, "paths"),
                ("probe_dead", 3, "answer"),
            )
        ),
    ],
)
def test_every_injected_fault_is_found_and_blamed_on_this_node(
    tmp_path: Path, fault: str, code: int, check: str
) -> None:
    model = tmp_path / "model"
    model.write_text("x")

    asked = ["--timeout", "4", "--path", str(model), "--port", str(free_port(""))]
    ended = run(tmp_path / "out", "--fake-fault", fault, *asked)

    wrong = {
        f.check for f in verdict_of(tmp_path / "out").findings if f.status in ("fail", "error")
    }
    assert ended.returncode == code
    assert check in wrong
    assert (tmp_path / "out" / "bad_nodes.txt").read_text() == f"{HERE}\n"
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_full_disk_is_found_on_the_disk_itself(small_disk: Path) -> None:
    ended = run(small_disk)

    (finding,) = [f for f in verdict_of(small_disk).findings if f.status == "fail"]
    assert ended.returncode == 1
    assert finding.check == "files"
    assert "ENOSPC" in str(finding.measured)


def test_a_disk_without_a_byte_left_still_tells_what_was_found(small_disk: Path) -> None:
    (small_disk / "nodes").mkdir()
    filled = subprocess.run(
        ["dd", "if=/dev/zero", f"of={small_disk / 'fill'}"], capture_output=True, check=False
    )
    assert b"No space left" in filled.stderr

    ended = run(small_disk)

    assert ended.returncode == 3
    assert "No space left on device" in ended.stderr
    assert "FAIL files" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_file_size_limit_is_found(tmp_path: Path) -> None:
    ended = run(tmp_path, prefix=("bash", "-c", 'ulimit -f 1024; exec "$@"', "bash"))

    (finding,) = [f for f in verdict_of(tmp_path).findings if f.status == "fail"]
    assert ended.returncode == 1
    assert finding.check == "files"


@pytest.mark.parametrize("where", ["a file", "in a file"])
def test_an_unwritable_folder_is_a_clear_error(tmp_path: Path, where: str) -> None:
    file = tmp_path / "file"
    file.touch()

    ended = run(file if where == "a file" else file / "sub")

    assert ended.returncode == 3
    assert "cannot write the results folder" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_files_named_like_modules_in_the_working_folder_do_no_harm(tmp_path: Path) -> None:
    for name in ("random.py", "torch.py", "psutil.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')\n")

    ended = run(tmp_path / "out", cwd=tmp_path)

    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_killed_command_leaves_no_probe_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shakedown.cli", "preflight", "--out", str(tmp_path)]
    command += ["--fake-fault", "probe_hang", "--timeout", "60"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    running.stdout.readline()
    # The probe, and the check that it runs in a session of its own.
    wait_for(lambda: len(probes(tmp_path)) > 1)

    running.kill()
    running.wait()
    running.stdout.close()

    wait_for(lambda: not probes(tmp_path))


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("waited in vain")


def probes(out: Path) -> list[str]:
    """Command lines of living probes that were given this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "shakedown.preflight.probe" in text and str(out) in text:
            found.append(text)
    return found


JOB = """#!/bin/bash
check() {{ {python} -P -m shakedown.cli preflight --timeout 8 "$@"; echo "$?" > "$2/code"; }}
mkdir -p good named dead
check --out good
check --out named --expect-gpus 2 --fake-fault gpu_missing:n2 --fake-fault no_disk:n3
kill -9 "$(cat {pid})"
check --out dead
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.skipif(shutil.which("slurmd") is None, reason="scripts/install_system.sh was not run")
def test_on_slurm_the_bad_nodes_are_named_and_a_dead_one_stops_nobody() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pf-"))  # Unix sockets need a short path
    pid = folder / "slurm" / "run" / "slurmd-n4.pid"
    script = folder / "job.sh"
    script.write_text(JOB.format(python=sys.executable, pid=pid))
    submit = ["sbatch", "--wait", "--no-kill", "--nodes=4", "--ntasks=4", "--gres=gpu:2", "-o"]

    ended = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "slurm_cluster.py"), "run", "--nodes", "4"]
        + ["--accounting", "none", str(folder / "slurm"), "--"]
        + [*submit, str(folder / "job.log"), "--chdir", str(folder), str(script)],
        capture_output=True,
        text=True,
        check=False,
    )

    log = (folder / "job.log").read_text() if (folder / "job.log").exists() else ended.stderr
    try:
        bad = {
            name: ((folder / name / "bad_nodes.txt").read_text().split(), code(folder / name))
            for name in ("good", "named", "dead")
        }
        pairs = json.loads((folder / "good" / "pairs.json").read_text())["pairs"]
    except OSError:
        pytest.fail(log + ended.stderr)
    assert bad == {"good": ([], 0), "named": (["n2", "n3"], 1), "dead": (["n4"], 1)}, log
    assert {name for pair in pairs for name in (pair["a"], pair["b"])} == {"n1", "n2", "n3", "n4"}
    shutil.rmtree(folder)


def code(folder: Path) -> int:
    return int((folder / "code").read_text())
