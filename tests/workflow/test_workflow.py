"""The workflow as a user calls it: dry run, lint, config errors, what reruns what."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = (
    "assets preflight accept_preflight serve agents accept_agents consistency "
    "accept_consistency release_server train diagnose accept_stage report_page"
).split()


def snakemake(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SNAKEMAKE")}
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "--nolock", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment,
        timeout=300,
    )


def test_dry_run_plans_every_rule_of_the_workflow(tmp_path: Path) -> None:
    result = snakemake("-n", "--config", f"results={tmp_path}")

    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert not [rule for rule in RULES if f"\n{rule} " not in output]
    assert not list(tmp_path.iterdir())


def test_lint_finds_nothing() -> None:
    result = snakemake("--lint")

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("serve={enigne: vllm}", "serve.enigne: unknown key (did you mean 'engine'?)"),
        ("seed=abc", "seed: Input should be a valid integer, got 'abc'"),
        ("data={reward: exact_mach}", "did you mean 'exact_match'?"),
        ("data={train: /nowhere/train.jsonl}", "data.train: got '/nowhere/train.jsonl'"),
        ("model={source: ./no-such-model}", "model.source: got './no-such-model'"),
        ("stages={sft: {allocation: 'fsdp:p2'}}", "stages.sft.allocation"),
        ("stages={sft: {fault: {kind: conditional_colective}}}", "conditional_collective"),
    ],
)
def test_wrong_config_is_refused_before_anything_runs(
    tmp_path: Path, change: str, expected: str
) -> None:
    result = snakemake("-n", "--config", f"results={tmp_path}", change)

    output = result.stdout + result.stderr
    assert result.returncode == 1
    assert expected in output
    assert "Traceback" not in output
    assert not list(tmp_path.iterdir())


def test_what_lint_advises_is_told_and_stops_nothing(tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    results = tmp_path / "results"
    overlay.write_text(
        f"results: {results}\ncluster: {{gpus_per_node: 8}}\nserve: {{keep: true}}\n"
    )
    result = snakemake("-n", "--configfile", str(overlay))

    assert result.returncode == 0, result.stderr
    output = result.stdout + result.stderr
    assert output.count(f"advice: {overlay}:3:9: serve.keep: got True, ") == 1


def test_resolved_config_is_written_and_the_same_run_again_does_nothing(tmp_path: Path) -> None:
    target = str(tmp_path / "demo" / "assets" / "assets.json")
    results = ("--config", f"results={tmp_path}")
    first = snakemake("--cores", "1", *results, "--", target)

    again = snakemake("--cores", "1", *results, "--", target)
    agent = "config/examples/addition_agent.py:AdditionAgent"
    other = snakemake("-n", *results, f"agents={{target: '{agent}'}}", "--", target)
    seed = snakemake("-n", *results, "seed=1", "--", target)

    assert first.returncode == 0, first.stderr
    assert "run: demo" in (tmp_path / "demo" / "config.resolved.yaml").read_text(encoding="utf-8")
    assert "Nothing to be done" in again.stdout + again.stderr
    assert "Nothing to be done" in other.stdout + other.stderr
    assert "\nassets " in seed.stdout + seed.stderr


def test_a_verdict_that_is_not_good_fails_its_gate_at_once_and_the_stage_runs_again(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"results: {tmp_path}\ncluster: {{gpus_per_node: 7}}\n", encoding="utf-8")
    target = str(tmp_path / "demo" / "preflight" / "accepted.json")

    result = snakemake("--cores", "1", "--configfile", str(config), "--", target)
    again = snakemake("-n", "--configfile", str(config), "--", target)

    output = result.stdout + result.stderr
    assert result.returncode == 1
    assert "FAIL gpus [node" in output
    assert "Error in rule accept_preflight" in output
    assert "MissingOutputException" not in output
    assert "\npreflight " in again.stdout + again.stderr
