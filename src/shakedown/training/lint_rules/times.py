"""Time-outs against each other: one that can never be reached, or that cuts another one short."""

from collections.abc import Iterator

from shakedown.core.verdict import Finding
from shakedown.training.lint_rules.inputs import Inputs, advice, fault

# inference/idle_limit.py notes a use so often while a command holds the server.
RENEWED_EVERY = 30.0
# Below this a job that waits in Slurm's queue finds the server gone; it would start another one.
_QUEUE_SECONDS = 300.0


def trainer_waits(inputs: Inputs) -> Iterator[Finding]:
    """Waits of a batch end before the trainer's, and the trainer's after a stall."""
    reward = inputs.config.data.reward_timeout
    for key, stage in inputs.stages:
        if not stage.grpo:
            continue
        grpo, limit = stage.grpo, stage.grpo.batch_timeout
        parts = [(f"{key}.grpo.weight_update_timeout", grpo.weight_update_timeout)]
        parts += [(f"{key}.grpo.agent_timeout", grpo.agent_timeout)] if grpo.agent else []
        parts += [] if grpo.agent else [("data.reward_timeout", reward)]
        for subject, seconds in parts:
            if seconds >= limit:
                expected = f"less than {key}.grpo.batch_timeout, {limit:g} s"
                remedy = "the trainer gives up its batch while this may still continue"
                yield advice("timeout", subject, seconds, expected, remedy)
        subject, stall, start = (
            f"{key}.grpo.batch_timeout",
            stage.stall_timeout,
            stage.start_timeout,
        )
        if limit < start:
            expected = f"at least {key}.start_timeout, {start:g} s"
            remedy = "the first batch waits for the stage's server to start"
            yield advice("timeout", subject, limit, expected, remedy)
        elif limit <= stall:
            expected = f"more than {key}.stall_timeout, {stall:g} s"
            remedy = "the stage would end before a stalled rollout is seen and its evidence kept"
            yield advice("timeout", subject, limit, expected, remedy)


def start_up(inputs: Inputs) -> Iterator[Finding]:
    """Start-up has at least the patience of a step; a stage's server at least the run's."""
    ready = inputs.config.serve.ready_timeout
    for key, stage in inputs.stages:
        subject, start = f"{key}.start_timeout", stage.start_timeout
        if start < stage.stall_timeout:
            expected = f"at least {key}.stall_timeout, {stage.stall_timeout:g} s"
            yield advice("timeout", subject, start, expected, "loading takes longer")
        elif stage.grpo and start < ready:
            expected = f"at least serve.ready_timeout, {ready:g} s"
            remedy = "the stage starts a server of its own, with the same model"
            yield advice("timeout", subject, start, expected, remedy)


def lease(inputs: Inputs) -> Iterator[Finding]:
    """The idle limit: more than the time between two uses, a wait in the queue, and a start."""
    serve = inputs.config.serve
    seconds = serve.lease
    if serve.engine == "external":  # never ended here
        return
    if seconds <= RENEWED_EVERY:
        expected = f"more than {RENEWED_EVERY:g} s: in use its idle time restarts this often"
        yield fault("lease", "serve.lease", seconds, expected)
    elif seconds < _QUEUE_SECONDS and inputs.config.cluster.launcher == "slurm":
        expected = f"{_QUEUE_SECONDS:g} s or more with launcher: slurm"
        remedy = "the server ends while the job that needs it waits in the queue"
        yield advice("lease", "serve.lease", seconds, expected, remedy)
    elif seconds < serve.ready_timeout:
        expected = f"at least serve.ready_timeout, {serve.ready_timeout:g} s"
        remedy = "an unused server ends sooner than another one is there"
        yield advice("lease", "serve.lease", seconds, expected, remedy)
