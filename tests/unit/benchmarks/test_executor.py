"""The executor benchmark's own parts: what it counts, and when it calls a run wrong."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from _slurm import WRAPPER

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "executor.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_executor", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_wrapper_notes_its_call_and_place_and_passes_arguments_and_exit_code_on(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    real = tmp_path / "real"
    real.write_text('#!/bin/sh\necho "$SLURM_CONF" "$2"; exit 7\n')
    real.chmod(0o755)
    log = tmp_path / "calls.log"
    wrapper = tmp_path / "sbatch"
    wrapper.write_text(WRAPPER.format(program="sbatch", log=log, slurm_conf="/etc/x", real=real))
    command = ["/bin/sh", str(wrapper), "--wrap", "two words"]

    outside = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    inside = subprocess.run(
        command,
        env={"SLURM_JOB_ID": "5", "SLURM_CONF": "/etc/own"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (outside.returncode, outside.stdout) == (7, "/etc/x two words\n")
    assert (inside.returncode, inside.stdout) == (7, "/etc/own two words\n")
    calls = benchmark.count_calls(log.read_text().splitlines())
    assert calls == {"client": {"sbatch": 1}, "job": {"sbatch": 1}}


def test_the_controllers_requests_are_read_by_message_type(benchmark: ModuleType) -> None:
    text = """
Jobs submitted: 3
Remote Procedure Call statistics by message type
\tREQUEST_SUBMIT_BATCH_JOB                ( 4003) count:3      ave_time:811    total_time:2433
\tREQUEST_JOB_INFO_SINGLE                 ( 2021) count:12     ave_time:90     total_time:1080

Remote Procedure Call statistics by user
\troot            (       0) count:15     ave_time:234    total_time:3513
"""

    requests = benchmark.count_requests(text)

    assert requests == {"REQUEST_SUBMIT_BATCH_JOB": 3, "REQUEST_JOB_INFO_SINGLE": 12}


@pytest.mark.parametrize(
    ("gathered", "ran", "words"),
    [
        ("0\n1\n", ["prep", "part 0", "part 1", "gather"], ""),
        ("0\n0\n", ["prep", "part 0", "part 1", "gather"], "the gathered file is wrong"),
        ("0\n1\n", ["prep", "part 0", "part 1", "part 1", "gather"], "part 1"),
        ("0\n1\n", ["prep", "part 1", "gather"], "part 0"),
    ],
)
def test_a_run_is_right_only_when_every_job_ran_once(
    benchmark: ModuleType, tmp_path: Path, gathered: str, ran: list[str], words: str
) -> None:
    (tmp_path / "all.txt").write_text(gathered)
    (tmp_path / "ran.txt").write_text("\n".join(ran))

    fault = benchmark.fault(tmp_path, 4)

    assert words in fault if words else fault == ""


def test_the_table_and_the_ratio_name_both_executors(benchmark: ModuleType) -> None:
    ours = benchmark.Run("ours", 100, 50.0, {"squeue": 7, "sbatch": 3}, {}, {"A": 4}, 93.4, 2.0, "")
    peer = benchmark.Run("peer", 100, 200.0, {"sbatch": 100}, {"srun": 100}, {}, 160.0, 9.0, "")

    lines = benchmark.table([ours, peer]).splitlines()

    assert lines[2] == "| 100 | ours | 50.0 | 10 (squeue 7, sbatch 3) | 0 | 4 | 93 | 2.0 | yes |"
    assert "| 100 (sbatch 100) | 100 (srun 100) |" in lines[3]
    assert benchmark.ratios([ours, peer]) == ["100 jobs: ours takes 0.25 of the peer's time"]
    assert benchmark.ratios([ours]) == []
