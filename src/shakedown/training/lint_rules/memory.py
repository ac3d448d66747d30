"""Whether what a stage needs fits into the memory of its GPUs, by its plan."""

from collections.abc import Iterator

from shakedown.core.errors import UsageError
from shakedown.core.verdict import Finding
from shakedown.training.forecast.cards import GB
from shakedown.training.forecast.show import micro_batch
from shakedown.training.forecast.stage import Plan, plan_of
from shakedown.training.lint_rules.inputs import Inputs, advice, fault


def fits(inputs: Inputs) -> Iterator[Finding]:
    """Refused is what no batch makes smaller: weights, gradients and optimizer. The rest is of the
    longest rows that may come, which a stage need never see: a warning.
    """
    if inputs.decoder is None:
        return
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
            yield advice("memory", f"{key}.micro_batch_size", measured, expected, remedy)


def _parts(plan: Plan) -> str:
    kinds = [f"{kind} {size / GB:.1f}" for kind, size in plan.trainer.items() if size >= GB // 20]
    if plan.beside:
        kinds.append(f"server {plan.beside / GB:.1f}")
    return f"{plan.needed / GB:.1f} GB a GPU with {micro_batch(plan.work)} ({', '.join(kinds)})"
