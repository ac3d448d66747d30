"""The ranks of a training stage without its supervisor, and rollouts for those of GRPO."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shakedown.config import StageConfig
from shakedown.config.lint import trainer_world
from shakedown.core.paths import StagePaths
from shakedown.rollout.batch import RolloutBatch
from shakedown.training.stage.job import StageJob, write_key
from tests.forked import ForkedWorker

SFT: dict[str, Any] = {
    "algorithm": "sft",
    "allocation": "fsdp:d2",
    "steps": 9,
    "batch_size": 8,
    "checkpoint_every": 3,
    "eval_samples": 4,
    "optimizer": {"lr": 0.002, "warmup_steps": 5, "weight_decay": 0.01},
}
GRPO: dict[str, Any] = {
    "algorithm": "grpo",
    "allocation": "fsdp:d2",
    "steps": 2,
    "batch_size": 3,
    "eval_samples": 0,
    "optimizer": {"lr": 0.01},
    "grpo": {"group_size": 4, "max_tokens": 4, "epochs": 2, "batch_timeout": 120.0},
}


class Stage:
    """The worker side of one stage in a folder of its own."""

    def __init__(
        self,
        assets: Path,
        root: Path,
        *,
        drift_limits: Mapping[str, float] | None = None,
        reward: str = "exact_match",
    ) -> None:
        self.paths, self._drift_limits = StagePaths(root), drift_limits or {}
        self._reward = reward
        self._assets = assets
        self._running: list[subprocess.Popen[str] | ForkedWorker] = []

    def start(
        self, config: dict[str, Any], *, wrapper: tuple[str, ...] = (), **changes: Any
    ) -> StageJob:
        """Start a new attempt's ranks: forked, or each an interpreter behind the command `wrapper`.

        Forked ranks share what an interpreter draws at its start, such as the seed of hashes.
        """
        stage_config = StageConfig.model_validate_json(json.dumps(config | changes))
        world_size = trainer_world(stage_config)
        attempt = self.paths.new_attempt()
        job = StageJob(
            stage="stage",
            config=stage_config,
            model=str(self._assets / "model"),
            dtype="float32",
            train=str(self._assets / "train.jsonl"),
            heldout=str(self._assets / "heldout.jsonl"),
            reward=self._reward,
            seed=0,
            world_size=world_size,
            stage_root=str(self.paths.root),
            attempt_root=str(attempt.root),
            drift_limits=self._drift_limits,
        )
        job.write(attempt.root / "job.json")
        write_key(attempt.key)
        port = _free_port()
        self._running = [self._rank(job, rank, port, wrapper) for rank in range(world_size)]
        return job

    def end(self) -> list[int]:
        """Exit codes by rank."""
        return [process.wait(timeout=120) for process in self._running]

    def run(self, config: dict[str, Any], **changes: Any) -> list[int]:
        self.start(config, **changes)
        return self.end()

    def signal(self, number: int) -> None:
        for process in self._running:
            process.send_signal(number)

    def kill(self, rank: int) -> None:
        self._running[rank].kill()

    def kill_rest(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def rows(self) -> list[dict[str, Any]]:
        text = self.paths.metrics.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def log(self, rank: int) -> str:
        newest = self.paths.attempt(self.paths.attempt_numbers()[-1])
        return newest.log(f"trainer-rank{rank}").read_text(encoding="utf-8")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, self.log(0)
            assert all(p.poll() is None for p in self._running), self.log(0) + self.log(1)
            time.sleep(0.05)

    def _rank(
        self, job: StageJob, rank: int, port: int, wrapper: tuple[str, ...]
    ) -> subprocess.Popen[str] | ForkedWorker:
        job_file = job.attempt.root / "job.json"
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        path = job.attempt.log(f"trainer-rank{rank}")
        if not wrapper:
            return ForkedWorker(job_file, path, environment)
        worker = [sys.executable, "-m", "shakedown.training.stage.worker", "--job", str(job_file)]
        with path.open("w", encoding="utf-8") as log:
            return subprocess.Popen(
                [*wrapper, *worker],
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rollout_batch(step: int, *, version: int = 0) -> RolloutBatch:
    """Three groups of four; the sample whose first token is `good` is rewarded."""
    draw = np.random.default_rng(step)
    prompt, answer = draw.integers(3, 60, (12, 5)), draw.integers(3, 60, (12, 3))
    good = np.arange(12) % 4 == 0
    answer[good, 0] = 70
    tokens = np.concatenate([prompt, answer], axis=1).astype(np.int64)
    mask = np.zeros((12, 8), dtype=np.bool_)
    mask[:, 5:] = True
    return RolloutBatch(
        step=step,
        versions=np.full(12, version, dtype=np.int64),
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
        rewards=good.astype(np.float32),
        groups=np.repeat(np.arange(3), 4),
        stats={"failed": 1.0},
    )
