"""Numbers of a stage against its steps, its rows, its ranks and the memory of its GPUs."""

import importlib.util
from collections.abc import Iterator

from shakedown.cluster.allocation import parse_allocation
from shakedown.config import StageConfig
from shakedown.core.errors import UsageError
from shakedown.core.verdict import Finding
from shakedown.training.assets import DEMO
from shakedown.training.demo import PAIRS
from shakedown.training.engines import OPTIONS
from shakedown.training.faults import KINDS, START
from shakedown.training.forecast.show import micro_batch
from shakedown.training.forecast.stage import StageForecast, plan_of
from shakedown.training.lint_rules.inputs import Inputs, advice, fault
from shakedown.training.metrics.flops import GB, KNOWN_GPUS
from shakedown.training.metrics.sinks import SINKS


def warm_up(inputs: Inputs) -> Iterator[Finding]:
    """The learning rate reaches what `lr` says. A short try of a long run does not: a warning."""
    for key, stage in inputs.stages:
        warmup = stage.optimizer.warmup_steps
        if warmup > stage.steps:
            subject, expected = (
                f"{key}.optimizer.warmup_steps",
                f"at most {key}.steps, {stage.steps}",
            )
            reached = stage.optimizer.lr * stage.steps / warmup
            remedy = f"the learning rate ends at {reached:.2g} of {stage.optimizer.lr:.2g}"
            yield advice("warm-up", subject, warmup, expected, remedy)


def checkpoints(inputs: Inputs) -> Iterator[Finding]:
    """A stage that is cut off has something to go on from."""
    for key, stage in inputs.stages:
        if stage.checkpoint_every > stage.steps:
            subject, every = f"{key}.checkpoint_every", stage.checkpoint_every
            expected = f"at most {key}.steps, {stage.steps}"
            remedy = "there is no checkpoint before the end: if cut off, the stage starts over"
            yield advice("checkpoint", subject, every, expected, remedy)


def batches(inputs: Inputs) -> Iterator[Finding]:
    """A batch has no row twice, and a micro batch is a part of a rank's share."""
    rows = inputs.train.count
    for key, stage in inputs.stages:
        if rows is not None and stage.batch_size > rows:
            expected = f"at most the {rows} rows of data.train"
            subject, remedy = f"{key}.batch_size", "the same rows are in a batch several times"
            yield advice("batch", subject, stage.batch_size, expected, remedy)
        share, micro = _share(stage), stage.micro_batch_size
        if micro is not None and share is not None and micro > share:
            subject, expected = f"{key}.micro_batch_size", f"at most a rank's share, {share}"
            yield advice("batch", subject, micro, expected, "it cuts nothing")
        budget, longest = stage.max_tokens_per_micro_batch, inputs.config.serve.max_model_len
        name = "serve.max_model_len"
        if stage.algorithm == "sft":
            name, longest = f"{key}.sft.max_length", (stage.sft and stage.sft.max_length) or 0
        if budget is not None and budget < longest:
            subject, expected = f"{key}.max_tokens_per_micro_batch", f"at least {name}, {longest}"
            remedy = "a longer sequence is a micro batch of its own and takes more memory than this"
            yield advice("batch", subject, budget, expected, remedy)


def _share(stage: StageConfig) -> int | None:
    """Sequences of a rank; None where an agent decides their number."""
    if stage.grpo and stage.grpo.agent:
        return None
    try:
        ranks = parse_allocation(stage.allocation).parts[0].size("d")
    except UsageError:
        return None
    return stage.batch_size * (stage.grpo.group_size if stage.grpo else 1) // ranks


def engine_options(inputs: Inputs) -> Iterator[Finding]:
    """The engine has the features that its stage asks for."""
    for key, stage in inputs.stages:
        try:
            part = parse_allocation(stage.allocation).parts[0]
        except UsageError:
            continue
        backend, remedy = part.backend, "or use an fsdp allocation"
        for name in ("activation_checkpointing", "compile", "max_tokens_per_micro_batch"):
            value = getattr(stage, name)
            if value and name not in OPTIONS.get(backend, {name}):
                off = "false" if value is True else "null"
                expected = f"{off}: the {backend} engine does not have it"
                yield fault("engine", f"{key}.{name}", value, expected, remedy)
        if stage.compile and backend == "fsdp" and part.size("t") > 1:
            expected = f"false with t{part.size('t')}: torch.compile fails on layers cut by t"
            yield fault("engine", f"{key}.compile", True, expected, "or spread over d alone")


def sinks(inputs: Inputs) -> Iterator[Finding]:
    """The packages of a stage's sinks are there; the nodes may have others than this machine."""
    for key, stage in inputs.stages:
        for name in stage.sinks:
            row = SINKS[name]
            if importlib.util.find_spec(row.package) is None:
                expected = f"the package {row.package}, which is not installed here"
                yield advice("sinks", f"{key}.sinks", name, expected, row.install)


def evaluation(inputs: Inputs) -> Iterator[Finding]:
    """There are as many held-out rows as are to be measured, and steps at which they are."""
    rows = inputs.heldout.count
    for key, stage in inputs.stages:
        if rows is not None and stage.eval_samples > rows:
            subject, expected = f"{key}.eval_samples", f"at most the {rows} rows of data.heldout"
            remedy = f"{rows} are measured"
            yield advice("evaluation", subject, stage.eval_samples, expected, remedy)
        if stage.eval_every and (stage.eval_every > stage.steps or not stage.eval_samples):
            subject, expected = f"{key}.eval_every", f"at most {key}.steps, {stage.steps}"
            if not stage.eval_samples:
                expected = f"0, as {key}.eval_samples is 0"
            yield advice("evaluation", subject, stage.eval_every, expected, "it measures nothing")


def faults(inputs: Inputs) -> Iterator[Finding]:
    """An injected fault has a step to strike at; START faults strike before the first."""
    for key, stage in inputs.stages:
        fault = stage.fault
        if fault is None or fault.kind not in KINDS:
            continue
        kind = KINDS[fault.kind]
        if kind.place not in START and fault.step > stage.steps:
            expected = f"at most {key}.steps, {stage.steps}"
            yield advice("fault", f"{key}.fault.step", fault.step, expected, "it never strikes")
        if kind.role == "orchestrator" and not stage.grpo:
            subject, expected = f"{key}.fault.kind", "a fault of trainer ranks: sft has no rollouts"
            yield advice("fault", subject, fault.kind, expected, "it never strikes")


def demo_problems(inputs: Inputs) -> Iterator[Finding]:
    """The demo has so many problems in all."""
    data = inputs.config.data
    if DEMO in (data.train, data.heldout) and data.train_size + data.heldout_size > PAIRS:
        expected = f"at most {PAIRS - data.heldout_size} beside data.heldout_size"
        remedy = f"the demo has {PAIRS} problems in all"
        yield fault("data", "data.train_size", data.train_size, expected, remedy)


def memory(inputs: Inputs) -> Iterator[Finding]:
    """A stage's plan fits into its GPUs.

    Refused is what no batch makes smaller: weights, gradients and optimizer. The rest is of the
    longest rows that may come, which a stage need never see: a warning.
    """
    cluster = inputs.config.cluster
    if inputs.decoder is None or not inputs.config.own_stages:
        return
    if cluster.gpus_per_node and not cluster.gpu_model:
        expected = f"the GPU as Slurm's gres names it, such as {', '.join(KNOWN_GPUS)}"
        remedy = "set it so that memory can be judged; until then micro batches have one row"
        yield advice("memory", "cluster.gpu_model", "empty", expected, remedy)
    for key, stage in inputs.stages:
        try:
            plan = plan_of(inputs.config, key.removeprefix("stages."), inputs.decoder)
        except UsageError:
            continue  # the allocation is judged elsewhere
        if plan.limit is None or plan.fits:
            continue
        expected = f"at most {plan.limit / GB:.0f} GB of {plan.gpu} (cluster.gpu_model)"
        remedy = f"{_parts(plan)}: shakedown train {plan.stage} --config FILE --plan"
        if plan.server and plan.server.tokens <= 0:
            weights = f"{plan.server.weights / GB:.1f} GB of weights a GPU"
            expected = "a share of the GPU's memory that holds the weights and a cache"
            yield fault("memory", "serve.allocation", weights, expected, remedy)
        elif plan.least > plan.limit:
            yield fault("memory", f"{key}.allocation", stage.allocation, expected, remedy)
        else:
            measured = f"{plan.needed / GB:.1f} GB"
            yield advice("memory", f"{key}.{_shrinking(stage)}", measured, expected, remedy)


def _shrinking(stage: StageConfig) -> str:
    """The key that makes the batch's part smaller; where it is left open, one row is too much."""
    cuts = ("micro_batch_size", "max_tokens_per_micro_batch")
    return next((name for name in cuts if getattr(stage, name)), "allocation")


def _parts(plan: StageForecast) -> str:
    kinds = [f"{kind} {size / GB:.1f}" for kind, size in plan.trainer.items() if size >= GB // 20]
    if plan.beside:
        kinds.append(f"server {plan.beside / GB:.1f}")
    return f"{plan.needed / GB:.1f} GB per GPU with {micro_batch(plan.work)} ({', '.join(kinds)})"
