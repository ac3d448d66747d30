"""GRPO: rollout batches in, clipped policy updates, new weights out."""

import time
from pathlib import Path

import numpy as np
import torch

from shakedown.config import GrpoConfig
from shakedown.core.errors import CannotJudgeError, ConfigError
from shakedown.models.huggingface import beating
from shakedown.rollout.batch import RolloutBatch
from shakedown.rollout.heldout import due
from shakedown.rollout.queue import keep_queue
from shakedown.rollout.recording import Recorder, read_step
from shakedown.rollout.store import RolloutStore
from shakedown.training.algorithms.base import StepResult
from shakedown.training.algorithms.past_weights import PastWeights
from shakedown.training.algorithms.policy_loss import (
    AdvantageKind,
    LossLevel,
    flat_groups,
    group_advantages,
    token_shares,
)
from shakedown.training.algorithms.policy_update import PolicyUpdate, ReferenceModel
from shakedown.training.batch import TokenBatch, take_rows
from shakedown.training.context import Context, StopRequestedError
from shakedown.training.drift import drift_watch

# Between two lines about a missing batch. Their text is that of prime-rl for a starving trainer.
WAITING_LINE_SECONDS = 10.0


class Grpo:
    """Takes the batch of each step from the exchange and publishes the weights after it.

    In a replay it takes recorded batches, and nobody wants the weights.
    """

    def __init__(self, context: Context) -> None:
        if context.job.config.grpo is None:
            raise ConfigError(f"stage {context.job.stage}: algorithm grpo needs a `grpo:` section")
        self._context = context
        self._settings: GrpoConfig = context.job.config.grpo
        self._exchange = RolloutStore(context.job.attempt.exchange)
        self._replay = Path(context.job.replay) if context.job.replay else None
        records = self._settings.record and self._replay is None and context.engine.rank == 0
        self._recorder = Recorder(context.job.paths.rollouts) if records else None
        self._policy = PolicyUpdate(
            context.engine,
            context.ranks,
            self._settings,
            micro_batch_size=context.job.config.micro_batch_size,
            max_tokens=context.job.config.max_tokens_per_micro_batch,
            reference=self._load_reference(),
        )
        self._past = self._past_weights()

    @property
    def max_answer_tokens(self) -> int:
        return self._settings.max_tokens

    def begin(self, done: int) -> None:
        """The server starts with the input model: after a resume it needs the newer weights."""
        if self._recorder:
            self._recorder.keep_until(done)
        if done:
            self._publish(done)

    def step(self, step: int) -> StepResult:
        began = time.monotonic()
        rollouts = self._wait(step)
        check_vocabulary(rollouts, self._context.engine.model_config)
        fetched = time.monotonic()
        batch = self._context.batch = token_batch(
            rollouts,
            pad=self._context.engine.tokenizer.pad_token_id,
            advantage=self._settings.advantage,
            level=self._settings.loss_level,
            drop_flat=self._settings.drop_flat_groups,
            longest=self._settings.max_tokens,
        )
        beat, written = self._context.beat_training, None
        if self._past is not None:
            written = self._past.score(batch, step - 1, beat)
        sums, values = self._policy.run(batch, beat, written)
        # Step s updates the weights of version s - 1.
        values |= rollout_metrics(rollouts, batch, trained=step - 1)
        values["wait_seconds"] = fetched - began
        values["train_seconds"] = time.monotonic() - fetched
        return StepResult(sums, values)

    def synchronise(self, step: int, /) -> float:
        # No batch comes after the last step: only the held-out evaluation wants its weights.
        config = self._context.job.config
        if step == config.steps and not due(step, config):
            return 0.0
        return self._publish(step)

    def _publish(self, step: int) -> float:
        context, began = self._context, time.monotonic()
        if self._replay is not None:
            return 0.0
        context.beat("weight_sync")
        weights = context.engine.gather(context.engine.torch_dtype)
        if context.engine.rank == 0:
            self._exchange.publish_weights(
                version=step, write=lambda folder: context.engine.export(folder, weights)
            )
        return time.monotonic() - began

    def attach(self, folder: Path, step: int) -> None:
        """The batches that wait for the trainer, and where the drawing of prompts stood."""
        keep_queue(self._exchange, step, folder)

    def finish(self) -> None:
        if self._context.engine.rank == 0 and self._replay is None:
            self._exchange.finish_trainer()

    def _wait(self, step: int) -> RolloutBatch:
        """The step's batch; rank 0 waits and says so, the others follow its decision."""
        self._context.faults.at("data", step)
        if self._replay is not None:
            self._context.beat("data")
            return read_step(self._replay, step)
        received: list[RolloutBatch] = []
        decision = self._context.broadcast_from_rank0(
            f"batch-{step}", lambda: self._await(step, received), phase="rollout_wait"
        )
        if decision == "stop":
            raise StopRequestedError
        # Before the step: the orchestrator removes a batch once the weights after it are published.
        if self._recorder:
            self._recorder.keep(self._exchange.batch_path(step), step)
        if received:  # rank 0 has read it while it waited
            return received[0]
        # A network file system may show the file to this rank a little later.
        return self._exchange.wait_batch(
            step, timeout=self._settings.batch_timeout, on_wait=self._beat_waiting
        )

    def _await(self, step: int, received: list[RolloutBatch]) -> str:
        """Wait on rank 0; fills `received` unless a stop is asked for."""
        said = time.monotonic()

        def on_wait() -> None:
            nonlocal said
            self._beat_waiting()
            if self._context.stop.requested:
                raise StopRequestedError
            if time.monotonic() - said >= WAITING_LINE_SECONDS:
                said = time.monotonic()
                print(f"Waiting for training batch to arrive (step {step})", flush=True)

        try:
            received.append(
                self._exchange.wait_batch(
                    step, timeout=self._settings.batch_timeout, on_wait=on_wait
                )
            )
        except StopRequestedError:
            return "stop"
        return "ready"

    def _beat_waiting(self) -> None:
        self._context.beat("rollout_wait")

    def _past_weights(self) -> PastWeights | None:
        """Where a drift is judged and tokens may be of older weights than the trainer's."""
        settings, context = self._settings, self._context
        if not (settings.async_level and drift_watch(context.job).limits):
            return None
        return PastWeights(
            context.engine,
            context.ranks,
            versions=settings.async_level,
            micro_batch_size=context.job.config.micro_batch_size,
            max_tokens=context.job.config.max_tokens_per_micro_batch,
            temperature=settings.temperature,
        )

    def _load_reference(self) -> ReferenceModel | None:
        if not self._settings.kl_coef:
            return None
        with beating(lambda: self._context.beat("init")):
            reference = ReferenceModel(self._context.job, self._context.engine.device)
        self._context.phases.follow(reference, logprobs="score")
        self._context.beat("init")
        return reference


def token_batch(
    rollouts: RolloutBatch,
    *,
    pad: int,
    advantage: AdvantageKind = "group_std",
    level: LossLevel = "token",
    drop_flat: bool = False,
    longest: int = 1,
) -> TokenBatch:
    """Rollouts as a batch to train on.

    Its extra tensors: the engine's `logprobs` [N, T], `advantages` [N], `share` [N] (each token's
    part in the loss), `place` [N, T] (the number of each trained token, 0 elsewhere), `lag` [N] or
    [N, T] (versions between the weights that wrote a token and those that the step updates).

    Args:
        pad: the padding's token.
        drop_flat: leave out groups whose rewards are all equal. When all are, the whole batch
            stays, to be measured, and no token has a share.
        longest: tokens of an answer at most, for the level `constant`.

    Raises:
        CannotJudgeError: a reward or a log-probability is NaN or infinite.
    """
    tokens = torch.as_tensor(np.asarray(rollouts.tokens, dtype=np.int64))
    # as_tensor shares the array's memory, and a column of the mask is written below.
    mask = torch.as_tensor(np.asarray(rollouts.loss_mask, dtype=bool)).clone()
    logprobs = torch.as_tensor(np.asarray(rollouts.logprobs, dtype=np.float32))
    rewards = torch.as_tensor(np.asarray(rollouts.rewards, dtype=np.float32))
    groups = torch.as_tensor(np.asarray(rollouts.groups, dtype=np.int64))
    if not (torch.isfinite(rewards).all() and torch.isfinite(logprobs[mask]).all()):
        raise CannotJudgeError(
            f"the batch of step {rollouts.step} holds rewards or logprobs that are NaN or infinite"
        )
    mask[:, 0] = False  # the first token has nothing to be predicted from
    lengths = _lengths(tokens, mask, pad=pad)
    first, episode = first_rows(rollouts)
    advantages = group_advantages(rewards[first], groups[first], kind=advantage)[episode]
    extra = {"logprobs": logprobs, "advantages": advantages, "lag": _lag(rollouts)}
    batch = TokenBatch(tokens, lengths, mask, extra)
    counted = torch.ones_like(groups, dtype=torch.bool)
    if drop_flat:
        counted = ~flat_groups(rewards, groups)
        if counted.any():
            batch, counted = take_rows(batch, counted.nonzero()[:, 0]), counted[counted]
    place = (batch.mask.flatten().cumsum(0).view_as(batch.mask) - 1) * batch.mask
    share = token_shares(batch.mask, counted, level=level, longest=longest)
    extra = {**batch.extra, "share": share, "place": place}
    return TokenBatch(batch.tokens, batch.lengths, batch.mask, extra)


def _lag(rollouts: RolloutBatch) -> torch.Tensor:
    """Step s updates the weights of version s - 1."""
    written = rollouts.versions if rollouts.token_versions is None else rollouts.token_versions
    return torch.as_tensor(rollouts.step - 1 - np.asarray(written, dtype=np.int64))


def check_vocabulary(rollouts: RolloutBatch, config: object) -> None:
    """Refuse tokens that the model has no embedding for, with a sentence and not a crash.

    Raises:
        CannotJudgeError: the batch holds such tokens.
    """
    size = getattr(config, "vocab_size", None)
    if size is not None and not ((rollouts.tokens >= 0) & (rollouts.tokens < size)).all():
        raise CannotJudgeError(
            f"the batch of step {rollouts.step} holds tokens outside of the model's vocabulary "
            f"of {size}",
            hint="another model wrote it: compare the trainer's model and the server's",
        )


def _lengths(tokens: torch.Tensor, mask: torch.Tensor, *, pad: int) -> torch.Tensor:
    """Up to the last trained token; without one, up to the padding. At least 1."""
    places = torch.arange(1, tokens.shape[1] + 1)
    last = (places * mask).max(1).values
    return torch.where(last > 0, last, (places * (tokens != pad)).max(1).values.clamp(min=1))


def first_rows(rollouts: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The first sequence of each episode [E], and for each sequence its episode [N], 0 to E - 1.

    Rewards are compared between episodes: one with many sequences does not count more often.
    """
    numbers = rollouts.episodes
    if numbers is None:
        numbers = np.arange(len(rollouts.rewards))
    _, first, episode = np.unique(numbers, return_index=True, return_inverse=True)
    return torch.as_tensor(first), torch.as_tensor(episode)


def rollout_metrics(rollouts: RolloutBatch, batch: TokenBatch, *, trained: int) -> dict[str, float]:
    """The figures of a batch itself.

    `staleness` of a sequence: versions between the one that wrote it and `trained`, the one it
    updates. The orchestrator's own numbers keep their names, after `rollout_`.

    Args:
        batch: what `token_batch` made of it; rewards are of all episodes, staleness is of all
            sequences, `tokens` of those that are left.
    """
    staleness = trained - np.asarray(rollouts.versions, dtype=np.int64)
    rewards = np.asarray(rollouts.rewards, dtype=np.float64)
    own = {f"rollout_{name}": float(value) for name, value in rollouts.stats.items()}
    return own | {
        "reward_mean": float(rewards[first_rows(rollouts)[0].numpy()].mean()),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "sequences": float(len(rewards)),
        "dropped_share": 1.0 - float((batch.extra["share"] > 0).sum()) / len(rewards),
        "tokens": float(batch.lengths.sum()),
        "trained_tokens": float(batch.trained_tokens),
    }
