"""Whether what a stage needs fits into the memory of its GPUs, by its plan."""

from collections.abc import Iterator

from shakedown.config import StageConfig
from shakedown.core.errors import UsageError
from shakedown.core.verdict import Finding
from shakedown.training.forecast.cards import GB, KNOWN
from shakedown.training.forecast.show import micro_batch
from shakedown.training.forecast.stage import Plan, plan_of
from shakedown.training.lint_rules.inputs import Inputs, advice, fault


def fits(inputs: Inputs) -> Iterator[Finding]:
    """Refused is what no batch makes smaller: weights, gradients and optimizer. The rest is of the
    longest rows that may come, which a stage need never see: a warning.
    """
    cluster = inputs.config.cluster
    if inputs.decoder is None or not inputs.config.own_stages:
        return
    if cluster.gpus_per_node and not cluster.gpu_model:
        expected = f"the GPU as Slurm's gres names it, such as {', '.join(KNOWN)}"
        remedy = "set it so that memory can be judged; open micro batches have one row till then"
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


def _parts(plan: Plan) -> str:
    kinds = [f"{kind} {size / GB:.1f}" for kind, size in plan.trainer.items() if size >= GB // 20]
    if plan.beside:
        kinds.append(f"server {plan.beside / GB:.1f}")
    return f"{plan.needed / GB:.1f} GB a GPU with {micro_batch(plan.work)} ({', '.join(kinds)})"
