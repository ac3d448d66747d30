"""The plan of a stage of a config: memory of trainer and server, and the trainer's speed."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shakedown.cluster.allocation import AllocationPart, parse_allocation
from shakedown.config import Config, StageConfig
from shakedown.config.capacity import MEMORY_OPTIONS, server_part
from shakedown.core.errors import UsageError
from shakedown.training.engines import DIMENSIONS, OPTIONS
from shakedown.training.forecast.decoder import Decoder
from shakedown.training.forecast.server import DEFAULT_SHARE, ServerForecast, Serving, plan_server
from shakedown.training.forecast.trainer import (
    Kinds,
    Work,
    copied,
    highest,
    states,
    total,
)
from shakedown.training.metrics.flops import Card, card_of, peak_flops

# MFU of dense training in bfloat16 on H100s: 38 to 43 % (Llama 3, arXiv 2407.21783, table 4).
EXPECTED_MFU = 0.40
_SIZES = {"float32": 4, "bfloat16": 2}
# As vLLM's gpu_memory_utilization: what is not planned (fragments, buffers of NCCL) takes the rest.
_FILLED = 0.9


@dataclass(frozen=True)
class StageForecast:
    """Bytes are of the rank that needs most.

    Attributes:
        moments: by moment of a step and kind.
        states: of weights, gradients and optimizer, which no batch makes smaller.
        host: CPU memory beside, by kind.
        server: None where the stage has none of its own.
        shared: trainer and server have a GPU together.
        limit: memory of the GPU; None: it is not known.
        mfu, tokens_per_second: expected, of all ranks; None without figures of the GPU.
        assumes: of the model's experts.
    """

    stage: str
    work: Work
    moments: Mapping[str, Kinds]
    states: int
    host: Kinds
    server: ServerForecast | None
    shared: bool
    gpu: str
    limit: int | None
    mfu: float | None = None
    tokens_per_second: float | None = None
    assumes: str = ""

    @property
    def moment(self) -> str:
        """The one at which most is needed."""
        return max(self.moments, key=lambda name: total(self.moments[name]))

    @property
    def trainer(self) -> Kinds:
        """Bytes by kind at that moment."""
        return self.moments[self.moment]

    @property
    def beside(self) -> int:
        """Bytes of the server on a trainer's GPU: its share whole, as it takes it at once."""
        if self.server is None or not self.shared:
            return 0
        return self.server.weights + max(0, self.server.cache)

    @property
    def needed(self) -> int:
        """Bytes on the fullest GPU."""
        return total(self.trainer) + self.beside

    @property
    def least(self) -> int:
        """The memory needed whatever the batch."""
        return self.states + self.beside

    @property
    def fits(self) -> bool | None:
        """None: the GPU's memory is not known."""
        if self.limit is None:
            return None
        served = self.server is None or self.server.tokens > 0
        return served and self.needed <= self.limit

    def to_json(self) -> dict[str, Any]:
        """The whole forecast, in bytes."""
        told = {"moment": self.moment, "needed": self.needed, "fits": self.fits}
        return {**asdict(self), **told}


def plan_of(
    config: Config, name: str, model: Decoder, *, length: int | None = None
) -> StageForecast:
    """The plan of a stage.

    Args:
        length: of the longest row in tokens; None: serve.max_model_len, which no row of a GRPO
            stage is above.

    Raises:
        UsageError: an allocation is not valid, or its engine has not these dimensions.
    """
    stage = with_micro_batches(config, name, model)
    return _plan(config, name, stage, model, length or config.serve.max_model_len)


def with_micro_batches(config: Config, name: str, model: Decoder | None) -> StageConfig:
    """The stage as its ranks run it: on GPUs, with the micro batches that the config leaves open.

    They hold as many of the longest rows as the plan fits into a GPU's memory, as a budget of
    tokens where the engine is cut by one; one row where model or GPU is not known, or none fits.
    No gradient depends on it, but for rounding.

    Raises:
        UsageError: as `plan_of`.
    """
    stage, length = config.own_stages[name], config.serve.max_model_len
    said = stage.micro_batch_size or stage.max_tokens_per_micro_batch
    if said or not config.cluster.gpus_per_node:
        return stage
    part = parse_allocation(stage.allocation).parts[0]
    share = _share(stage, part)

    def cut(rows: int) -> StageConfig:
        if "max_tokens_per_micro_batch" in OPTIONS.get(part.backend, ()):
            return stage.model_copy(update={"max_tokens_per_micro_batch": rows * length})
        # Evenly: an engine without a budget fills all micro batches up to the largest.
        return stage.model_copy(update={"micro_batch_size": -(-share // -(-share // rows))})

    def fits(rows: int) -> bool:
        if model is None:
            return False
        plan = _plan(config, name, cut(rows), model, length)
        return plan.fits is True and plan.needed <= _FILLED * (plan.limit or 0)

    # A pipeline's stages have something to do if there are as many micro batches.
    most = max(1, share // part.size("p"))
    # All rows at once are judged apart: they need no sum of gradients beside.
    if fits(most):
        return cut(most)
    return cut(max(1, bisect_left(range(1, most), True, key=lambda rows: not fits(rows))))


def _plan(
    config: Config, name: str, stage: StageConfig, model: Decoder, length: int
) -> StageForecast:
    card = card_of(config.cluster.gpu_model)
    work = _work(config, stage, length)
    flops = peak_flops(config.cluster.gpu_model, config.model.dtype) if card else None
    mfu, speed = _speed(stage, model, work, flops) if flops else (None, None)
    server = _server(config, stage, model, card, flops)
    shared = config.serve.share_gpus and config.cluster.gpus_per_node > 0
    return StageForecast(
        stage=name,
        work=work,
        moments=highest(model, work),
        states=states(model, work),
        host=_host(stage, model, work),
        server=server,
        shared=shared and server is not None,
        gpu=card.name if card else config.cluster.gpu_model,
        limit=card.memory if card else None,
        mfu=mfu,
        tokens_per_second=speed,
        assumes=model.assumes,
    )


def _work(config: Config, stage: StageConfig, length: int) -> Work:
    part = parse_allocation(stage.allocation).parts[0]
    known = DIMENSIONS.get(part.backend, frozenset())
    if part.experts or any(size > 1 and name not in known for name, size in part.dims.items()):
        raise UsageError(f"allocation {stage.allocation!r}: expected one of a training engine here")
    grpo, budget = stage.grpo, stage.max_tokens_per_micro_batch
    share = _share(stage, part)
    # A budget below a row's length: that row is alone.
    rows = max(1, budget // length) if budget else stage.micro_batch_size or share
    micro = min(rows, share)
    return Work(
        backend=part.backend,
        d=part.size("d"),
        t=part.size("t"),
        p=part.size("p"),
        size=_SIZES[config.model.dtype],
        rows=micro,
        budget=min(max(budget, length), share * length) if budget else 0,
        length=length,
        # Of an own agent's conversation any token may be the model's.
        trained=min(length, grpo.max_tokens) if grpo and not grpo.agent else length,
        micro_batches=-(-share // micro),
        checkpointing=stage.activation_checkpointing,
        evaluates=grpo is None and stage.eval_samples > 0,
        reference=grpo is not None and grpo.kl_coef > 0,
        gpu=config.cluster.gpus_per_node > 0,
    )


def _share(stage: StageConfig, part: AllocationPart) -> int:
    """Rows of a rank; an agent may make more or fewer."""
    rows = stage.batch_size * (stage.grpo.group_size if stage.grpo else 1)
    return -(-rows // part.size("d"))


def _host(stage: StageConfig, model: Decoder, work: Work) -> dict[str, int]:
    """A checkpoint's copy, and the past weights that the drift check scores by."""
    weights, optimizer = copied(model, work)
    found = {"checkpoint copy": weights + optimizer}
    if stage.grpo and stage.grpo.async_level and stage.grpo.drift.action != "off":
        found["past weights"] = (stage.grpo.async_level + 1) * weights
    return found


def _speed(stage: StageConfig, model: Decoder, work: Work, flops: float) -> tuple[float, float]:
    """Expected MFU, and trained rows' tokens per second over all ranks.

    Forward passes that MFU does not count take their share: checkpointing one more a pass
    backward (Korthikanti et al., arXiv 2205.05198, section 4), GRPO's scores one for the policy
    before the update and one for a reference. A pipeline of p stages idles (p - 1) of m + p - 1
    micro batches (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    epochs = stage.grpo.epochs if stage.grpo else 1
    useful = 3 * epochs  # in forward passes: backward takes two
    scores = (stage.grpo.decoupled + (stage.grpo.kl_coef > 0)) if stage.grpo else 0
    done = useful + epochs * work.checkpointing + scores
    busy = work.micro_batches / (work.micro_batches + work.p - 1)
    mfu = EXPECTED_MFU * (busy * useful / done)
    operations = model.shape.flops_per_token(work.length) * epochs
    return mfu, mfu * flops * work.d * work.t * work.p / operations


def _server(
    config: Config, stage: StageConfig, model: Decoder, card: Card | None, flops: float | None
) -> ServerForecast | None:
    serve = config.serve
    if stage.grpo is None or serve.engine == "external":
        return None
    part = server_part(serve)
    serving = Serving(
        d=part.size("d") * serve.nodes,
        t=part.size("t"),
        p=part.size("p"),
        size=_SIZES[config.model.dtype],
        share=memory_share(serve.engine, serve.extra_args),
        length=serve.max_model_len,
        cache_bytes=int(serve.kv_cache_gb * 2**30),
        sequences=stage.grpo.max_concurrent,
    )
    return plan_server(model, serving, card, flops)


def memory_share(engine: str, words: list[str]) -> float:
    """The share of a GPU's memory in the engine's options; lint judges invalid values."""
    option, told = MEMORY_OPTIONS.get(engine, ""), ""
    for place, word in enumerate(words):
        name, mark, value = word.partition("=")
        if option and name.replace("_", "-") == option:
            told = value if mark else "".join(words[place + 1 : place + 2])
    try:
        share = float(told)
    except ValueError:
        return DEFAULT_SHARE
    return share if 0 < share <= 1 else DEFAULT_SHARE
