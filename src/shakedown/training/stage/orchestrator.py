"""The inference side of a GRPO stage: `python -m shakedown.training.stage.orchestrator --job F`.

Waits for the stage's server, generates and rewards a batch for every step, keeps staleness within
`async_level`, loads the trainer's weights into the server as they appear and verifies them. Exit
codes: 0 the trainer has finished, 75 stopped by a signal, else as every command.
"""

import argparse
import asyncio
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shakedown.agents.reward_pool import RewardPool
from shakedown.config import GrpoConfig
from shakedown.core.errors import INTERRUPTED, ConfigError, ServerError, ShakedownError
from shakedown.data_sources import load_rows
from shakedown.inference.auth import read_secret
from shakedown.inference.client import Client
from shakedown.models.huggingface import read_config, read_tokenizer
from shakedown.monitor.heartbeat import Heartbeat, read_heartbeats
from shakedown.progress.patience import SHORTEST, WARN_SHARE
from shakedown.rollout.agent_sampler import (
    AgentGroupSampler,
    ModelServer,
    agent_prompts,
    check_engine,
)
from shakedown.rollout.controller import RolloutController
from shakedown.rollout.groups import Group, Prompt, encode_prompts, to_batch
from shakedown.rollout.queue import (
    FinishedGroup,
    QueuedPrompt,
    RolloutQueue,
    SavedQueue,
    find_queue,
    longest_prompt,
)
from shakedown.rollout.samplers import GroupSampler
from shakedown.rollout.staleness import foretell, stage_rule
from shakedown.rollout.store import RolloutStore
from shakedown.rollout.weights import FleetSync, probe_tokens
from shakedown.training.checkpoint.checkpoints import find
from shakedown.training.checkpoint.fingerprint import fingerprint
from shakedown.training.faults import Injector
from shakedown.training.stage.curve import HeldOutCurve
from shakedown.training.stage.job import StageJob, read_job
from shakedown.training.stage.reported_error import report_error
from shakedown.training.stage.servers import connected, weight_sync

_POLL_SECONDS = 0.02  # the trainer's files: another process, so that nothing can be awaited
_BEAT_SECONDS = 0.5
_HEALTH_SECONDS = 2.0
_HELD_SECONDS = 5.0  # without rollout capacity, until the log says so: shorter waits are normal
_SAY_SECONDS = 2.0  # between lines of the log: small models take many steps a second
_PROBE_PROMPTS = 64  # enough to fill the probe, also with short prompts
_SETTLE_SECONDS = 3.0  # srun ends a little after its last task


def trainers_live(job: StageJob) -> bool:
    """Whether a trainer rank has not said that it is done, or is still there on this host."""
    host = socket.gethostname()[:64]  # cut as in a heartbeat
    return any(
        beat.phase != "finished" or (beat.host == host and psutil.pid_exists(beat.pid))
        for beat in read_heartbeats(job.attempt.heartbeats)
        if beat.role == "trainer"
    )


async def first_to_end(*loops: Coroutine[Any, Any, None]) -> None:
    """Run until one ends; cancel the others; raise its error."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the orchestrator of one attempt and return its exit code."""
    parser = argparse.ArgumentParser(prog="shakedown.training.stage.orchestrator")
    parser.add_argument("--job", type=Path, required=True, help="job.json of the attempt")
    args = parser.parse_args(argv)
    job = None
    try:
        job = read_job(args.job)
        return asyncio.run(_until_signal(job))
    except ShakedownError as error:
        traceback.print_exc()
        print(f"shakedown: {error}", file=sys.stderr, flush=True)
        if job is not None:
            report_error(job.attempt, "orchestrator", error)
        return int(error.exit_code)


async def _until_signal(job: StageJob) -> int:
    """Run to the end, or return 75 after SIGTERM, SIGINT or SIGUSR2."""
    loop, work = asyncio.get_running_loop(), asyncio.ensure_future(orchestrate(job))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        print("stopped by a signal", flush=True)
        return INTERRUPTED
    return 0


async def orchestrate(job: StageJob) -> None:
    """Serve the trainer until it has finished.

    Raises:
        ConfigError: the settings would block forever.
        ServerError: the server did not start, is not healthy, or does not obey.
        CannotJudgeError: no batch can be complete.
    """
    settings = _checked(job)
    heartbeat = Heartbeat(job.attempt.heartbeats, 0, role="orchestrator")
    heartbeat.beat(phase="init")
    tokenizer = read_tokenizer(Path(job.model))
    vocabulary = getattr(read_config(Path(job.model)), "vocab_size", None)
    prompts = (
        agent_prompts(job.train, tokenizer)
        if settings.agent
        else encode_prompts(load_rows(job.train), tokenizer, job.chat_template_kwargs)
    )
    async with connected(job, heartbeat, patience=settings.batch_timeout) as client:
        probe = probe_tokens(
            [p.tokens for p in prompts[:_PROBE_PROMPTS]], longest=await client.longest()
        )
        sync = weight_sync(job, client, probe)
        await sync.begin()
        # An agent writes its own prompts.
        longest = None
        if not settings.agent:
            longest = longest_prompt(prompts, await client.room(), settings.max_tokens)
        orchestrator = Orchestrator(
            Parts(job, settings, client, sync, heartbeat, prompts, tokenizer, vocabulary, longest)
        )
        await orchestrator.run()


def _checked(job: StageJob) -> GrpoConfig:
    """The stage's settings, or why they can never work."""
    settings = job.config.grpo
    if settings is None:
        raise ConfigError(f"stage {job.stage} has no `grpo:` section: it needs no orchestrator")
    if settings.agent:
        check_engine(job.stage, job.engine)
    stage_rule(job.stage, settings, job.config.batch_size)
    return settings


@dataclass(frozen=True)
class Parts:
    """The parts that the loops work with."""

    job: StageJob
    settings: GrpoConfig
    client: Client
    sync: FleetSync
    heartbeat: Heartbeat
    prompts: Sequence[Prompt]
    tokenizer: Any
    vocabulary: int | None
    longest: int | None


class Orchestrator:
    """The loops of a stage; all share one event loop and end with the first that ends."""

    def __init__(self, parts: Parts) -> None:
        job, self._settings, tokenizer = parts.job, parts.settings, parts.tokenizer
        self._job, self._client, self._sync = job, parts.client, parts.sync
        self._heartbeat = parts.heartbeat
        self._pad = int(tokenizer.pad_token_id)
        self._store = RolloutStore(job.attempt.exchange)
        self._start, saved = _resumed(job, self._settings, self._heartbeat)
        self._version, self._syncing = 0, False
        self._curve = HeldOutCurve(job, self._settings, parts.client, tokenizer, start=self._start)
        self._faults = Injector(job.config.fault, 0, role="orchestrator")
        self._step, self._said = self._start + len(saved.batches) + 1, 0.0
        self._sync_seconds, self._held = 0.0, time.monotonic()
        self._workers: RewardPool | AgentGroupSampler
        self._sampler: GroupSampler | AgentGroupSampler
        if self._settings.agent:
            self._workers = self._sampler = AgentGroupSampler(
                ModelServer(
                    parts.client.base_url, job.served_model, read_secret(job.attempt.secret)
                ),
                self._settings,
                lambda: self._version,
                failed_share=job.reward_failed_share,
            )
        else:
            self._workers = pool = RewardPool(job.reward, job.reward_limits)
            self._sampler = GroupSampler(
                self._client,
                tokenizer,
                pool,
                self._settings,
                lambda: self._version,
                vocabulary=parts.vocabulary,
                failed_share=job.reward_failed_share,
            )
        self._queue = RolloutQueue(
            self._store,
            parts.prompts,
            self._sampler.run_group,
            seed=job.seed,
            saved=saved,
            longest=parts.longest,
            refill=self._settings.refill_flat_groups,
        )
        groups = job.config.batch_size
        rule = stage_rule(job.stage, self._settings, groups)
        print(f"rollouts: {foretell(rule)}", flush=True)
        self._controller: RolloutController[QueuedPrompt, FinishedGroup] = RolloutController(
            self._queue.run,
            max_concurrent=rule.max_concurrent,
            max_head_offpolicyness=rule.max_head_offpolicyness,
            batch_size=groups,
            source=self._queue.draws(),
            total=(job.config.steps - self._start) * groups,
            accepted=len(saved.batches) * groups,
        )

    async def run(self) -> None:
        """Run until the trainer has finished and its processes are gone.

        Raises:
            UsageError: the reward function cannot be used.
        """
        async with self._workers, self._controller:
            await self._resume()
            await first_to_end(
                self._batches(), self._weights(), self._health(), self._beats(), self._finish()
            )
            # Only now: a loop that still ran could write its own phase after it.
            self._heartbeat.beat(phase="finished", step=self._step - 1)
            await asyncio.sleep(_SETTLE_SECONDS if self._job.config.nodes > 1 else 0.0)
        print("the trainer has finished", flush=True)

    async def _resume(self) -> None:
        """Wait for the weights that a resumed trainer publishes first; older batches are void."""
        if not self._start:
            return
        self._queue.publish_saved()
        print(f"waiting for the weights of step {self._start} to go on from", flush=True)
        while self._store.latest_version() < self._start:
            self._heartbeat.beat(phase="init", step=self._start)
            await asyncio.sleep(_POLL_SECONDS)
        await self._load_newest()

    async def _batches(self) -> None:
        """Publish the batch of each step; then wait for the others to end."""
        while self._step <= self._job.config.steps:
            self._faults.at("rollout", self._step, self._controller)
            began = time.monotonic()
            groups = self._queue.take(self._step, await self._controller.next_batch())
            self._publish(groups, time.monotonic() - began)
            self._step += 1
        await asyncio.Event().wait()

    def _publish(self, groups: Sequence[Group], waited: float) -> None:
        stats = {
            "batch_seconds": waited,
            "held_seconds": self._controller.held_seconds,
            "weight_update_seconds": self._sync_seconds,
            "server_version": float(self._version),
            "failed_groups": float(sum(self._controller.failures.values())),
            "groups_ready": float(self._controller.ready),
            "left_out_prompts": float(self._queue.left_out),
            "replaced_groups": float(self._queue.replaced),
        }
        batch = to_batch(self._step, groups, pad=self._pad, stats=stats)
        self._store.publish_batch(batch)
        now = time.monotonic()
        if now - self._said >= _SAY_SECONDS or self._step == self._job.config.steps:
            self._said = now
            print(
                f"batch {self._step}/{self._job.config.steps}: {len(batch.rewards)} samples, "
                f"reward {batch.rewards.mean():.3f}, weights of version {self._version}",
                flush=True,
            )

    async def _weights(self) -> None:
        """Load the versions that the trainer publishes, and measure those that are due."""
        while True:
            await self._curve.measure(self._version)  # rollouts go on beside it
            if self._store.latest_version() > self._version:
                await self._load_newest()
            await asyncio.sleep(_POLL_SECONDS)

    async def _load_newest(self) -> None:
        """Load while no generation is in flight: every token is of one version."""
        limit = self._settings.weight_update_timeout
        self._controller.pause()
        # Not part of the update: groups that end meanwhile are progress, and a server that stands
        # still is noticed.
        await self._sampler.pause(limit)
        newest = self._store.latest_version()
        version = self._curve.next_version(after=self._version, newest=newest)
        self._syncing = True
        try:
            # With the version: two updates within one step are not one that stands still.
            self._heartbeat.beat(phase="weight_sync", step=self._step, micro_batch=version)
            weights = self._store.weights(version)
            self._faults.at("weights", weights.version)
            self._sync_seconds = await self._sync.apply(weights, within=limit)
            self._version = weights.version
            self._store.mark_loaded(weights.version)
            self._controller.set_version(weights.version - self._start)  # since this start
        finally:
            self._syncing = False
        self._sampler.resume()  # not after an error: nothing is sampled with unknown weights
        self._controller.resume()

    async def _health(self) -> None:
        """End the stage when the server is not healthy for too long, or no reward comes.

        Raises:
            ServerError: names the server and what it answered last.
            BadRewardError, AgentFailedError: the reward function or the agent fails too often.
        """
        # Before the watch sees a stall.
        patience = max(SHORTEST, WARN_SHARE * self._job.config.stall_timeout)
        healthy = time.monotonic()
        while True:
            self._sampler.check()
            fault = await self._client.faults()
            now = time.monotonic()
            if not fault or self._syncing:  # a server may answer nothing while it loads
                healthy = now
            if now - healthy > patience:
                raise ServerError(
                    f"the inference server at {self._job.endpoint} has not been healthy for "
                    f"{now - healthy:.0f} s: {fault}",
                    hint=f"read {self._job.attempt.log('inference')}",
                )
            await asyncio.sleep(_HEALTH_SECONDS)

    async def _beats(self) -> None:
        told: tuple[int, ...] = ()
        while True:
            if not self._syncing:  # an update tells of itself
                told = self._beat(told)
            await asyncio.sleep(_BEAT_SECONDS)

    def _beat(self, told: tuple[int, ...]) -> tuple[int, ...]:
        """A beat only when something has begun or ended: a server that hangs must be noticed.

        Args:
            told: what the last one told of. Returns the same of this one.
        """
        running, groups = self._controller.running > 0, self._controller.accepted
        # The version too: the first group after an update may be long in coming.
        now = (running, groups, self._workers.progress, self._curve.progress, self._version)
        if not running and not self._curve.measuring:
            self._heartbeat.beat(phase="rollout_wait", step=self._step)
            self._say_held()
        elif now != told:
            self._heartbeat.beat(
                phase="data" if running else "eval",
                step=self._step,
                micro_batch=groups % self._job.config.batch_size,
                batch_size=self._settings.group_size,
            )
        return now

    def _say_held(self) -> None:
        """Log why the staleness rule holds rollouts back, which looks like a hang."""
        now = time.monotonic()
        if self._controller.capacity > 0:
            self._held = now
        elif now - self._held >= _HELD_SECONDS:
            self._held = now
            print(
                f"no rollout capacity: {self._controller.accepted} groups are made, and the "
                f"staleness limit allows no more before weights newer than version "
                f"{self._controller.version}",
                flush=True,
            )

    async def _finish(self) -> None:
        """Wait until the trainer has finished and its processes, which still write, have ended.

        The stage's supervisor takes an orchestrator that ends first for a failure.
        """
        # Files of another process: there is no event to wait for.
        while not self._store.trainer_finished() or trainers_live(self._job):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)


def _resumed(job: StageJob, settings: GrpoConfig, heartbeat: Heartbeat) -> tuple[int, SavedQueue]:
    """The step that the trainer goes on from, by its own rule over the same files; the queue."""
    found = find(job.paths.checkpoints, fingerprint(job), beat=lambda: heartbeat.beat(phase="init"))
    step = 0 if found.meta is None else found.meta.step
    groups, level = job.config.batch_size, settings.async_level
    return step, find_queue(found.folder, step, batch_size=groups, async_level=level)


if __name__ == "__main__":
    sys.exit(main())
