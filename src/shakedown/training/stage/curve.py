"""The held-out curve of a stage with a server: measured by it, beside the training."""

from typing import Any

from shakedown.config import GrpoConfig
from shakedown.inference.client import Client
from shakedown.rollout.heldout import ServerEvaluation, due, read_held_out, told
from shakedown.training.metrics.record import MetricsLog
from shakedown.training.stage.job import StageJob
from shakedown.training.stage.results import read_rows


class HeldOutCurve:
    """The versions of the weights that are still to be measured, and the measurement.

    Args:
        start: the step that the attempt continues from. Earlier measurements of later steps are
            void.

    `measuring`: one is being measured now.
    """

    def __init__(
        self, job: StageJob, settings: GrpoConfig, client: Client, tokenizer: Any, *, start: int
    ) -> None:
        self._job, self._start = job, start
        self._log = MetricsLog(job.attempt.evals)
        attempts = [job.paths.attempt(number) for number in job.paths.attempt_numbers()]
        steps = [row.get("step") for attempt in attempts for row in read_rows(attempt.evals)]
        self._done = {step for step in steps if isinstance(step, int) and step <= start}
        self._evaluation: ServerEvaluation | None = None
        self.measuring = False
        if job.config.eval_samples:
            held_out = read_held_out(
                job.heldout,
                limit=job.config.eval_samples,
                tokenizer=tokenizer,
                max_tokens=settings.max_tokens,
                template_kwargs=job.chat_template_kwargs,
            )
            self._evaluation = ServerEvaluation(
                client, tokenizer, held_out, job.reward, job.reward_limits
            )

    @property
    def progress(self) -> int:
        """Grows with every answer and reward."""
        return 0 if self._evaluation is None else self._evaluation.progress

    def next_version(self, *, after: int, newest: int) -> int:
        """The version to load next: the newest, unless an earlier one is to be measured."""
        coming = range(max(after + 1, self._start), newest)
        return next(filter(self._is_due, coming), newest)

    async def measure(self, version: int) -> None:
        """Measure the weights that the server has, where they are due.

        Raises:
            ServerError: the server answers no row.
            StorageError: the figures cannot be written.
        """
        if self._evaluation is None or not self._is_due(version):
            return
        self.measuring = True
        scores = await self._evaluation.measure()
        self.measuring = False
        self._done.add(version)
        self._log.append({"step": version, **scores})
        print(told(version, scores), flush=True)

    def _is_due(self, version: int) -> bool:
        return due(version, self._job.config) and version not in self._done
