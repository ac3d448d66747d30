"""A rank that the kernel kills for memory leaves no word; its cgroup has counted it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LIMIT = 900 << 20
EATER = """#!{python}
import os, time
kept = []
for step in range(1, 200):
    print("step", step, flush=True)
    time.sleep(0.1)
    if os.environ["RANK"] == "1" and step > 4:
        kept.append(bytearray(60_000_000))
"""
CONFIG = """
run: m
results: {folder}/results
order: [lab]
stages:
  lab:
    algorithm: command
    launch: torchrun
    ranks_per_node: 2
    command: {folder}/eat.py
    progress: {{pattern: 'step (?P<step>\\d+)'}}
    stall_timeout: 40
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup with less memory than the rank wants."""
    root = Path("/sys/fs/cgroup")
    is_v1 = (root / "memory").is_dir()
    folder = (root / "memory" if is_v1 else root) / f"shakedown-test-{os.getpid()}"
    try:
        folder.mkdir()
        name = "memory.limit_in_bytes" if is_v1 else "memory.max"
        (folder / name).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no cgroup of memory may be made here: {error}")
    yield folder
    folder.rmdir()


def test_the_rank_that_the_kernel_killed_is_out_of_memory_by_its_cgroups_count(
    tmp_path: Path, cgroup: Path
) -> None:
    eater = tmp_path / "eat.py"
    eater.write_text(EATER.format(python=sys.executable))
    eater.chmod(0o755)
    (tmp_path / "c.yaml").write_text(CONFIG.format(folder=tmp_path))
    inside = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    train = [sys.executable, "-m", "shakedown.cli", "train", "lab", "--config", "c.yaml"]

    done = subprocess.run(
        ["sh", "-c", inside, "sh", *train],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    attempt = tmp_path / "results/m/stages/lab/attempts/001"
    analysis = [sys.executable, "-m", "shakedown.cli", "hang", "analyze", str(attempt)]
    analysis += ["--json", "-"]
    said = subprocess.run(analysis, capture_output=True, text=True, check=False).stdout

    assert done.returncode == 1, done.stderr
    diagnosis = json.loads(said)["diagnosis"]
    assert (diagnosis["cause"], diagnosis["culprits"]["ranks"]) == ("out_of_memory", [1]), said
