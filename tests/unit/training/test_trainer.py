"""The trainer's pure parts, and decisions of rank 0 that other ranks follow."""

import contextlib
import math
import socket
import socketserver
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shakedown import cli
from shakedown.core.errors import CannotJudgeError
from shakedown.rollout.batch import RolloutBatch
from shakedown.training.algorithms import ALGORITHMS, algorithm_class
from shakedown.training.algorithms.grpo import rollout_metrics, token_batch
from shakedown.training.coordination import Ranks
from shakedown.training.nan_guard import DivergedError, finite
from shakedown.training.stage import worker


def test_a_loss_that_is_no_number_is_named_with_its_step() -> None:
    with pytest.raises(DivergedError, match="step 7: grad_norm, loss"):
        finite(7, {"grad_norm": math.inf, "loss": math.nan, "lr": 0.1})


def test_finite_numbers_pass_with_nine_digits() -> None:
    assert finite(1, {"loss": 1 / 3}) == {"loss": 0.333333333}


def test_every_algorithm_of_the_registry_exists() -> None:
    assert [algorithm_class(name).__name__ for name in ALGORITHMS] == ["Sft", "Grpo"]


def test_a_rank_that_fails_unforeseen_ends_with_its_traceback_and_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_path: Path) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(worker, "read_job", fail)

    assert worker.main(["--job", str(tmp_path)]) == 1
    assert "RuntimeError: Connection closed by peer" in capsys.readouterr().err


def test_a_stage_that_the_config_does_not_have_is_refused_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(Path(__file__).parents[3] / "config/config.yaml")
    place = ["--assets", str(tmp_path / "none.json"), "--run-dir", str(tmp_path / "run")]

    assert cli.main(["train", "grppo", "--config", config, *place]) == 2

    assert "has no stage 'grppo' (did you mean 'grpo'?); it has: sft, grpo" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def _rollouts() -> RolloutBatch:
    mask = np.array([[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]], bool)
    return RolloutBatch(
        step=5,
        versions=np.array([4, 3, 4, 2]),
        tokens=np.array([[1, 9, 8, 2, 0], [1, 9, 2, 0, 0], [1, 9, 7, 0, 0], [1, 9, 6, 6, 2]]),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        rewards=np.array([1, 0, 0, 1], np.float32),
        groups=np.array([0, 0, 1, 1]),
        stats={"seconds": 2.0},
    )


def test_rollouts_become_a_batch_with_lengths_up_to_the_last_sampled_token() -> None:
    batch = token_batch(_rollouts(), pad=0)

    assert batch.lengths.tolist() == [4, 3, 3, 5]
    assert batch.trained_tokens == 6
    assert batch.extra["advantages"].tolist() == pytest.approx([0.707, -0.707, -0.707, 0.707], 1e-3)
    assert batch.masked("logprobs").tolist() == [-1.0] * 6


def test_staleness_counts_versions_behind_the_one_that_is_updated() -> None:
    rollouts = _rollouts()

    metrics = rollout_metrics(rollouts, token_batch(rollouts, pad=0), trained=4)

    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (0.75, 2.0)
    assert (metrics["reward_mean"], metrics["rollout_seconds"]) == (0.5, 2.0)


class _Rank(Ranks):
    """A rank of a group that has no process group, only the store."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.rank, self.world_size = rank, 2
        self._store, self._device, self._decisions = store, torch.device("cpu"), 0
        self._key = b"key"


def _both(decide_first: str | Exception) -> tuple[list[object], list[int]]:
    """Let rank 0 decide and rank 1 follow; what each returned or raised, and rank 1's waits."""
    store, waits = dist.HashStore(), list[int]()
    results: list[object] = [None, None]
    store.set_timeout(timedelta(seconds=20))

    def decide() -> str:
        while not waits:
            pass
        if isinstance(decide_first, Exception):
            raise decide_first
        return decide_first

    def run(rank: int) -> None:
        try:
            results[rank] = _Rank(rank, store).broadcast_from_rank0(
                "what", decide, waiting=lambda: waits.append(1)
            )
        except (ValueError, CannotJudgeError) as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results, waits


def test_other_ranks_follow_the_decision_and_wait_with_beats() -> None:
    results, waits = _both("go")

    assert results == ["go", "go"]
    assert waits


class _Counted(socketserver.ThreadingTCPServer):
    """Hands on what clients send to a store, and counts it."""

    daemon_threads = True

    def __init__(self, store: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handed)
        self.store, self.sent = store, 0
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}).start()


class _Handed(socketserver.BaseRequestHandler):
    server: _Counted

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.store)) as store:
            threading.Thread(target=self._back, args=(store,), daemon=True).start()
            while data := self.request.recv(1 << 16):
                self.server.sent += len(data)
                store.sendall(data)

    def _back(self, store: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := store.recv(1 << 16):
                self.request.sendall(data)


def test_a_rank_that_waits_asks_the_store_once_however_long_it_waits() -> None:
    """A thousand that asked fifty times a second were what rank 0 was busy with."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True)
    sent, counted = list[int](), _Counted(store.port)
    follower = dist.TCPStore("127.0.0.1", counted.server_address[1], None)

    def waiting() -> None:
        sent.append(counted.sent)
        if len(sent) == 4:
            _Rank(0, store).broadcast_from_rank0("what", lambda: "go", waiting=waiting)

    found = _Rank(1, follower).broadcast_from_rank0("what", lambda: "", waiting=waiting)
    counted.shutdown()
    counted.server_close()

    assert found == "go"
    assert len(set(sent)) == 1


def test_other_ranks_hear_that_rank_0_gave_up() -> None:
    results, _ = _both(ValueError("no disk"))

    assert isinstance(results[0], ValueError)
    assert isinstance(results[1], CannotJudgeError)
    assert "no disk" in str(results[1])


def test_rank_0_leaves_with_its_failure_after_the_others_have_read_it() -> None:
    """Its process holds the store: one that looked later would find a broken connection."""
    store, asked = dist.HashStore(), threading.Event()
    store.set_timeout(timedelta(seconds=20))
    first, errors = _Rank(0, store), list[BaseException]()

    def decide() -> str:
        asked.set()
        raise ValueError("no disk")

    def broadcast_from_rank0() -> None:
        try:
            first.broadcast_from_rank0("what", decide, waiting=lambda: None)
        except ValueError as error:
            errors.append(error)

    leader = threading.Thread(target=broadcast_from_rank0)
    leader.start()
    asked.wait(20)
    leader.join(0.3)
    stayed = leader.is_alive()
    with pytest.raises(CannotJudgeError, match="no disk"):
        _Rank(1, store).broadcast_from_rank0("what", lambda: "", waiting=lambda: None)
    leader.join(20)

    assert stayed
    assert [str(error) for error in errors] == ["no disk"]
