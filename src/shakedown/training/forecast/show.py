"""A stage's plan as a table."""

from collections.abc import Iterator

from shakedown.training.forecast.server import ServerForecast
from shakedown.training.forecast.stage import EXPECTED_MFU, StageForecast
from shakedown.training.forecast.trainer import Work, total
from shakedown.training.metrics.flops import GB


def render(plan: StageForecast) -> str:
    """The plan as text for people; GB are 10^9 bytes."""
    work = plan.work
    cut = f"{work.backend}:d{work.d}t{work.t}p{work.p}"
    rows = f"{work.micro_batches} micro batches of {micro_batch(work)}"
    dtype = "float32" if work.size == 4 else "bfloat16"
    again = ", activation checkpointing" if work.checkpointing else ""
    lines = [
        f"plan of stage {plan.stage}: {cut}, {dtype}, {rows}{again}",
        "a rank's GB by kind, at the moments of a step at which it may be highest:",
        *_table(plan),
    ]
    if plan.assumes:
        lines.insert(1, f"assumes {plan.assumes}")
    if plan.server:
        lines += _server(plan, plan.server)
    lines += [_row(f"host: {kind}", size) for kind, size in plan.host.items()]
    return "\n".join([*lines, *_speed(plan), _judged(plan)])


def micro_batch(work: Work) -> str:
    """The largest one."""
    if work.budget:
        return f"{work.budget} tokens in rows of up to {work.length}"
    return f"{work.rows} rows of up to {work.length} tokens"


def _table(plan: StageForecast) -> Iterator[str]:
    moments = plan.moments
    kinds = dict.fromkeys(kind for each in moments.values() for kind in each)
    yield " " * 18 + "".join(f"{name:>12}" for name in moments)
    for kind in kinds:
        yield f"  {kind:<16}" + "".join(
            f"{each.get(kind, 0) / GB:>12.3f}" for each in moments.values()
        )
    yield "  trainer         " + "".join(f"{total(each) / GB:>12.3f}" for each in moments.values())


def _row(name: str, size: int) -> str:
    return f"  {name:<22}{size / GB:>8.3f} GB"


def _server(plan: StageForecast, server: ServerForecast) -> Iterator[str]:
    yield "the server's rank" + (", on the same GPU:" if plan.shared else ":")
    yield _row("server weights", server.weights)
    yield _row("keys and values", max(0, server.cache)) + f", {server.tokens} tokens a replica"
    if server.speed is not None:
        yield f"  generates {server.speed:,.0f} tokens per second at most, all replicas together"


def _speed(plan: StageForecast) -> Iterator[str]:
    if plan.mfu is None or plan.tokens_per_second is None:
        told = f"{plan.gpu!r} is not known" if plan.gpu else "cluster.gpu_model is empty"
        yield f"no speed, memory alone: {told}"
        return
    yield (
        f"expected: MFU {plan.mfu:.0%}, {plan.tokens_per_second:,.0f} trained tokens per second "
        f"(from {EXPECTED_MFU:.0%}, as Llama 3 reports of H100s; without waits for the network)"
    )


def _judged(plan: StageForecast) -> str:
    needed = f"{plan.needed / GB:.1f} GB per GPU"
    if plan.limit is None:
        return f"WARN {needed}: not compared, as the GPU's memory is not known"
    word = "PASS" if plan.fits else "FAIL"
    return f"{word} {needed} of {plan.limit / GB:.0f} GB ({plan.gpu})"
