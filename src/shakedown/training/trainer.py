"""The loop of a training stage on one rank: steps, metrics, checkpoints, evaluation, export."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch.distributed as dist

from shakedown.core.errors import ShakedownError
from shakedown.core.folders import staged_folder
from shakedown.rollout.heldout import due, read_held_out, told
from shakedown.training.algorithms import algorithm_class
from shakedown.training.algorithms.base import Algorithm
from shakedown.training.checkpoint.checkpoints import Checkpoints
from shakedown.training.checkpoint.fingerprint import fingerprint
from shakedown.training.context import Context, StopRequestedError
from shakedown.training.drift import (
    DriftError,
    advice,
    compare_command,
    drift_watch,
    note_stop,
    sentence,
    stops,
)
from shakedown.training.evaluate import Evaluator, ServedScores
from shakedown.training.faults import DataEndedError, SwallowedError
from shakedown.training.metrics.meter import StepMeter
from shakedown.training.metrics.record import MetricsLog, MetricsRecord
from shakedown.training.nan_guard import checked

_POLL_SECONDS = 0.1  # of the held-out figures, a file of another process


class Trainer:
    """One rank's part of a stage; all ranks run it in step."""

    def __init__(self, context: Context) -> None:
        job = context.job
        self._context = context
        epochs = job.config.grpo.epochs if job.config.grpo else 1
        context.engine.total_updates = job.config.steps * epochs
        self._algorithm: Algorithm = algorithm_class(job.config.algorithm)(context)
        self._record = MetricsRecord(job) if self._is_rank0 else None
        self._meter = StepMeter(context)
        self._evals = MetricsLog(job.attempt.evals)
        # Rank 0 alone chooses and publishes. A copy of the model on another node has another time
        # of change: each of its ranks would read all of it.
        self._made = fingerprint(job) if self._is_rank0 else {}
        self._checkpoints = Checkpoints(
            job.paths.checkpoints,
            engine=context.engine,
            ranks=context.ranks,
            fingerprint=self._made,
            keep=job.config.keep_checkpoints,
            beat=lambda: context.beat("checkpoint"),
            fence=job.fence.check,
        )
        self._evaluator = self._build_evaluator()
        self._served = ServedScores(job.attempt.evals)
        self._begun = 0
        # The last step with a checkpoint, begun or done, and the last with a row of metrics: after
        # an error no checkpoint may appear that has no row.
        self._saved = self._logged = 0
        self._drift = drift_watch(job)

    @property
    def _is_rank0(self) -> bool:
        return self._context.engine.rank == 0

    def run(self) -> bool:
        """Train to the last step.

        Returns:
            True when all steps are done, False when it was asked to stop and the state is saved.

        Raises:
            DivergedError: the loss is not finite; each rank's batch is saved.
            StorageError: a file system is full or failed.
        """
        try:
            completed = self._train()
        except SwallowedError:  # the injected fault of an exception that one rank's code hides
            completed = True
        except Exception:
            # From here on nothing collective is called: the other ranks may hang or be gone.
            self._checkpoints.leave(self._logged)
            raise
        finally:
            if self._record is not None:
                self._record.close()
        finish_together(self._context)
        return completed

    def _train(self) -> bool:
        """The loop; returns whether all steps are done, or the state was saved before."""
        context, config = self._context, self._context.job.config
        done = self._resume()
        if done == 0:
            self._plot(0, self._evaluate(0))
        self._meter.begin()
        stopped = False
        try:
            for step in range(done + 1, config.steps + 1):
                context.step = step
                context.profile(step)
                context.faults.at("step", step, context)
                try:
                    result = self._algorithm.step(step)
                except DataEndedError:  # an injected fault: this rank has fewer batches than others
                    break
                except StopRequestedError:  # while the batch was awaited: the step before is saved
                    self._save(step - 1)
                    stopped = True
                    break
                with context.phases("sync"):
                    failure = _failure(partial(self._algorithm.synchronise, step))
                # One sum ends the step: the metrics, who was asked to stop, how the checkpoint's
                # threads stand, who failed. A rank that acted on its own answer would leave the
                # others waiting.
                flags = {"_stop": float(context.stop.requested), **self._checkpoints.flags()}
                sums = context.ranks.all_reduce_or_raise({**result.sums, **flags}, failure)
                stopping = sums.pop("_stop") > 0
                self._checkpoints.agree(sums)
                row = {"step": step, **checked(context, {**sums, **result.values})}
                row |= self._evaluate(step)
                self._watch_drift(row)
                # Before the row, which tells how long this took. The folder appears only after
                # `logged`: a resume from a checkpoint without its row would leave a gap in the
                # metrics.
                if stopping or step == config.steps or step % config.checkpoint_every == 0:
                    if not stopping:
                        self._await_served(step - 1)
                    self._save(step)
                row |= self._meter.columns(row)
                self.log_metrics(step, row)
                self._logged = step
                self._checkpoints.logged(step)
                stopped = stopping and step < config.steps
                if stopped:
                    break
        finally:
            context.profile(None)
        if not stopped:
            self._algorithm.finish()
            self._export()
        self._checkpoints.wait()
        return not stopped

    def _resume(self) -> int:
        """Begin after the last checkpoint; returns its step."""
        context = self._context
        context.beat("checkpoint")
        done = self._checkpoints.resume()
        context.step = self._saved = self._logged = self._begun = done
        context.data = self._checkpoints.data
        if self._record is not None:
            self._record.begin(done, self._made, self._checkpoints.before)
        # Rank 0 alone publishes weights in `begin`: its error must reach the ranks that go on.
        failure = _failure(lambda: self._algorithm.begin(done))
        context.ranks.all_reduce_or_raise({}, failure)
        return done

    def _watch_drift(self, row: Mapping[str, float]) -> None:
        """Report a drift, or end the stage: before a checkpoint of such weights, with the row.

        Raises:
            DriftError: the engine's log-probabilities are beyond the limits.
        """
        drifts, job = self._drift.add(row), self._context.job
        if not drifts:
            return
        told = sentence(drifts)
        if stops(job):
            self.log_metrics(self._context.step, {**row, **self._meter.columns(row)})
            if self._is_rank0:
                note_stop(job, told)
            raise DriftError(told, hint=compare_command(job))
        if self._is_rank0:
            print(f"drift: {told}; {advice(drifts[0])}", flush=True)

    def log_metrics(self, step: int, row: Mapping[str, float]) -> None:
        """One row in metrics.jsonl; now and then a line for people."""
        self._context.faults.at("metrics", step)
        if self._record is None:
            return
        for scores in self._served.new() if self._context.job.generates else ():
            if scores["step"] < step:  # this step's own are in its row
                self._plot(scores.pop("step"), scores)
        self._record.append(row)

    def _plot(self, step: int, scores: Mapping[str, float]) -> None:
        if self._record is not None and scores:
            self._record.plot({"step": step, **scores})

    def _save(self, step: int) -> None:
        """Begin a checkpoint; it is written beside the training."""
        if step == self._saved:
            return
        self._context.beat("checkpoint")
        with self._context.phases("checkpoint"):
            self._checkpoints.begin(
                step,
                data=dict(self._context.data),
                attach=lambda folder: self._algorithm.attach(folder, step),
            )
        self._context.beat("train")  # or what hangs next has a checkpoint's patience
        self._saved = step

    def _evaluate(self, step: int) -> dict[str, float]:
        """The held-out figures where they are due after `step`; the stage's server measures beside
        the training, so that only the last step's are waited for.
        """
        config = self._context.job.config
        if not due(step, config):
            return {}
        if self._evaluator is None:
            return self._await_served(step) if step == config.steps else {}
        with self._context.phases("eval"):
            return self._measure(step, self._evaluator)

    def _measure(self, step: int, evaluator: Evaluator) -> dict[str, float]:
        """The ranks answer, rank 0 judges; the others wait and beat."""
        context = self._context

        def beat() -> None:
            context.beat("eval")

        beat()
        # Collective: outside of what rank 0 does alone.
        texts = evaluator.answers(seed=context.job.seed, progress=beat)

        def measure() -> str:
            scores = evaluator.scores(texts, progress=beat)
            self._evals.append({"step": step, **scores})
            print(told(step, scores), flush=True)
            return json.dumps(scores)

        scores: dict[str, float] = json.loads(
            context.broadcast_from_rank0(f"eval-{step}", measure, phase="eval")
        )
        scores.pop("samples")
        return scores

    def _await_served(self, step: int) -> dict[str, float]:
        """Wait until the server has measured all that is due up to `step`; the last one's figures.

        Before a checkpoint, as the one who goes on from it has no weights but the checkpoint's.
        """
        context, config = self._context, self._context.job.config
        # Of the step that was resumed from an earlier attempt may have the figures.
        first = self._begun + 1 if self._begun else 0
        wanted = [number for number in range(first, step + 1) if due(number, config)]
        if not context.job.generates or not wanted:
            return {}

        def wait() -> str:
            while not context.stop.requested and not all(map(self._served.of, wanted)):
                context.beat("eval")
                time.sleep(_POLL_SECONDS)
            return json.dumps(self._served.of(step))

        with context.phases("eval"):
            text = context.broadcast_from_rank0(f"served-{step}", wait, phase="eval")
        scores: dict[str, float] = json.loads(text)
        return {name: value for name, value in scores.items() if name not in ("step", "samples")}

    def _build_evaluator(self) -> Evaluator | None:
        job, engine = self._context.job, self._context.engine
        if not job.config.eval_samples or job.generates:
            return None
        held_out = read_held_out(
            job.heldout,
            limit=job.config.eval_samples,
            tokenizer=engine.tokenizer,
            max_tokens=self._algorithm.max_answer_tokens,
            template_kwargs=job.chat_template_kwargs,
        )
        return Evaluator(held_out, engine, reward=job.reward, limits=job.reward_limits)

    def _export(self) -> None:
        """Export the trained model as a Hugging Face folder, complete or absent."""
        context, target = self._context, self._context.job.paths.export
        context.beat("checkpoint")
        weights = context.engine.gather(context.engine.torch_dtype)  # collective, as in `_measure`

        def write() -> str:
            context.job.fence.check()
            with staged_folder(target) as staged:
                context.engine.export(staged, weights)
            return str(target)

        written = context.broadcast_from_rank0("export", write, phase="checkpoint")
        if self._is_rank0:
            print(f"model written to {written}", flush=True)


def _failure(act: Callable[[], object]) -> ShakedownError | None:
    """The error of this rank alone, to be told in the next sum of all."""
    try:
        act()
    except ShakedownError as error:
        return error
    return None


def finish_together(context: Context) -> None:
    """Wait until all ranks are done before one leaves: rank 0 serves the store."""
    cleanup()
    context.beat("finished")


def cleanup() -> None:
    """The last collective of every rank."""
    dist.barrier()
    dist.destroy_process_group()
