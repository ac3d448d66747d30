"""Memory of a trainer's rank by kind, at the moments of a step at which it may be highest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shakedown.training.engines import BLOCK_BYTES, ONE_UNIT_PARAMETERS, pieces_of
from shakedown.training.forecast.decoder import FLOAT32, Decoder, Layer

# Moments of AdamW: two numbers in float32 a parameter (Loshchilov and Hutter, arXiv 1711.05101).
_MOMENTS = 2 * FLOAT32
# Rows that are answered at once in a held-out evaluation: BATCH of training/evaluate.py.
_EVALUATED_ROWS = 32
# Pieces of a block of logits that are held in float32 at once (`_Scored.backward`): the logits,
# their powers and a product.
_HELD_PIECES = 3

# Kind -> bytes.
Kinds = Mapping[str, int]


@dataclass(frozen=True)
class Work:
    """How a stage cuts model and batch; sizes of a micro batch are the longest that may come.

    Attributes:
        backend: fsdp, archon or megatron, over `d` x `t` x `p` ranks.
        size: bytes of a number in the dtype that is computed in.
        rows, length: of a micro batch, in tokens with prompt.
        trained: tokens of a row that are trained.
        micro_batches: of a step, if all rows are the longest.
        budget: tokens of a micro batch, padding included, however long its rows are; 0: those of
            `rows`.
        evaluates: the ranks themselves answer held-out rows.
        reference: a second model beside the policy.
        gpu: Megatron's optimizer is spread over the data ranks on GPUs alone; gloo's copies are
            on CPUs alone.
    """

    backend: str
    d: int
    t: int
    p: int
    size: int
    rows: int
    length: int
    trained: int
    micro_batches: int
    checkpointing: bool = False
    evaluates: bool = False
    reference: bool = False
    gpu: bool = True
    budget: int = 0

    @property
    def tokens(self) -> int:
        """That a micro batch computes."""
        return self.budget or self.rows * self.length

    @property
    def trained_tokens(self) -> int:
        """Trained tokens of a micro batch; a budget may be filled with trained tokens alone."""
        return self.budget or self.rows * self.trained


@dataclass(frozen=True)
class _Part:
    """One pipeline stage: parameters of a rank before `d` shards them.

    Attributes:
        kinds: how many layers of each kind.
        layer, body, root: of the largest layer; of all layers; of embedding, last norm and head.
        head: of the head alone.
        flying: micro batches whose activations are held at once.
    """

    kinds: Mapping[Layer, int]
    layer: int
    body: int
    root: int
    head: int
    flying: int

    @property
    def parameters(self) -> int:
        return self.body + self.root

    @property
    def layers(self) -> int:
        return sum(self.kinds.values())


def highest(model: Decoder, work: Work) -> dict[str, Kinds]:
    """Bytes by kind at each moment of a step, of the rank that needs most."""
    stages = [dict(_moments(model, work, stage)) for stage in range(work.p)]
    return max(stages, key=lambda moments: max(map(total, moments.values())))


def total(kinds: Kinds) -> int:
    """Bytes of all kinds together."""
    return sum(kinds.values())


def states(model: Decoder, work: Work) -> int:
    """Bytes of weights, gradients and optimizer on the rank that has most of them: what is needed
    whatever the batch.
    """
    parts = [_part(model, work, stage) for stage in range(work.p)]
    return max(total(_held(part, work)) + _gradients(part, work) for part in parts)


def copied(model: Decoder, work: Work) -> tuple[int, int]:
    """Bytes of weights and of optimizer that the rank with most of them holds between steps."""
    held = [_held(_part(model, work, stage), work) for stage in range(work.p)]
    most = max(held, key=total)
    return most["weights"], most["optimizer"]


def _part(model: Decoder, work: Work, stage: int) -> _Part:
    first, last = stage == 0, stage == work.p - 1
    # transformers' embedding and head are whole on every tensor rank; Megatron cuts them.
    words = model.embedding // (work.t if work.backend == "megatron" else 1)
    shared = model.tied and work.p == 1
    root = words * (first + last - shared) + (model.hidden if last else 0)
    # 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2): a stage holds as many as stages follow
    # it. With fewer micro batches than stages all are held.
    count = work.micro_batches
    each = model.layers // work.p
    kinds = model.layers_of(stage * each, (stage + 1) * each)
    sizes = {layer: layer.matrices // work.t + layer.whole for layer in kinds}
    return _Part(
        kinds=kinds,
        layer=max(sizes.values(), default=0),
        body=sum(count * sizes[layer] for layer, count in kinds.items()),
        root=root,
        head=words if last else 0,
        flying=count if count < work.p else work.p - stage,
    )


def _held(part: _Part, work: Work) -> dict[str, int]:
    """Weights and optimizer, which are there between steps, too.

    FSDP (Rajbhandari et al., arXiv 1910.02054, stage 3): weights and moments in float32, a share
    of each. Megatron: weights in the dtype; its optimizer has float32 weights beside bfloat16
    ones (Megatron Core, "Distributed Optimizer": 2 + 4 + 12/d bytes per parameter).
    """
    own, d = part.parameters, work.d
    if work.backend == "megatron":
        spread = d if work.gpu else 1
        master = 0 if work.size == FLOAT32 else FLOAT32
        return {"weights": work.size * own, "optimizer": (_MOMENTS + master) * own // spread}
    return {"weights": FLOAT32 * own // d, "optimizer": _MOMENTS * own // d}


def _gradients(part: _Part, work: Work) -> int:
    """Gradients in float32: sharded, or Megatron's buffer of all of them."""
    return FLOAT32 * part.parameters // (1 if work.backend == "megatron" else work.d)


def _moments(model: Decoder, work: Work, stage: int) -> Iterator[tuple[str, Kinds]]:
    part = _part(model, work, stage)
    last = stage == work.p - 1
    base = _held(part, work)
    if work.reference:
        base["reference"] = base["weights"]
    layer = max((_layer_activations(model, work, each) for each in part.kinds), default=0)
    activations = part.flying * (_saved(model, work, part) + last * _last_norm(model, work))
    step = _megatron_step if work.backend == "megatron" else _sharded_step
    for name, kinds in step(part, work, activations, layer):
        # Logits are gone when the layers' backward pass begins.
        logits = {"logits": _logits(model, work)} if last and name == "head" else {}
        yield name, {**base, **kinds, **logits}
    if work.evaluates:
        # Megatron's buffer of gradients stays; others have none between steps.
        kept = _gradients(part, work) if work.backend == "megatron" else 0
        answers = _evaluation(model, work, part)
        yield "evaluation", {**base, "gradients": kept, "evaluation": answers}


def _megatron_step(
    part: _Part, work: Work, activations: int, _layer: int
) -> Iterator[tuple[str, Kinds]]:
    """The buffer of gradients is always there."""
    yield "head", {"gradients": _gradients(part, work), "activations": activations}


def _sharded_step(
    part: _Part, work: Work, activations: int, layer: int
) -> Iterator[tuple[str, Kinds]]:
    """FSDP2's units, after torch's _fsdp_param_group.py (2.13): beside the sharded state a unit in
    its backward pass has its weights and gradients whole, the unit before it its weights, and the
    unit after it the float32 input of its reduction; the unit of the rest is whole all the time.
    """
    size, unit, whole = work.size, part.layer, part.parameters
    grads = _gradients(part, work)
    before = grads if work.micro_batches > 1 else 0  # of the micro batches before this one
    head = size * part.head
    # Of the micro batches that are on their way while one ends.
    others = activations * (part.flying - 1) // part.flying
    if work.d == work.t == work.p == 1 and size == FLOAT32:
        # Not wrapped. With one micro batch gradients come as activations go.
        yield "head", {"gradients": max(before, head), "activations": activations}
        yield "end", {"gradients": grads + head, "activations": layer}
        return
    if _unsharded_parameters(part, work) < ONE_UNIT_PARAMETERS:
        # FSDP reduces after the last micro batch, until which it adds up whole gradients in
        # float32; a pipeline's stage after each.
        kept = before if work.p > 1 or not before else FLOAT32 * whole
        yield (
            "head",
            {"gathered": size * whole, "gradients": kept + head, "activations": activations},
        )
        end = _one_unit_reduced(work, whole, kept)
        if work.p > 1:  # keeps the weights, and has reduced gradients beside
            end = {"gathered": size * whole, "gradients": (size + FLOAT32) * whole + before}
        yield "end", {**end, "activations": others}
        return
    # A pipeline's stage keeps its layers gathered while micro batches are on their way.
    root = size * part.root + (size * part.body if work.p > 1 else 0)
    around = size * unit * (1 if work.p > 1 else 3)
    yield "head", {"gathered": root, "gradients": before + head, "activations": activations}
    for done, name in ((0, "last layer"), (1, "layers")):
        yield (
            name,
            {
                "gathered": root + around + done * FLOAT32 * unit,
                "gradients": before + head,
                "activations": activations - done * layer * (not work.checkpointing),
            },
        )
    yield (
        "end",
        {
            "gathered": root + FLOAT32 * (unit + part.root),
            "gradients": grads + size * part.root,
            "activations": others,
        },
    )


def _one_unit_reduced(work: Work, whole: int, kept: int) -> dict[str, int]:
    """While the gradients of a model of one unit are reduced, at the highest of three moments: when
    they are all there, when they are copied into one float32 buffer (the weights are freed before,
    if no micro batch follows), and when that is reduced, without them.

    gloo scatters out of a copy of the whole buffer (measured with torch 2.13: 98 MiB for 96, on 2
    and on 4 ranks); NCCL does so in place.
    """
    fresh = 0 if kept and work.size == FLOAT32 else work.size * whole  # else added in place
    buffer, share = FLOAT32 * whole, FLOAT32 * whole // work.d
    moments = [
        {"gathered": work.size * whole, "gradients": kept + fresh},
        {"gathered": 0, "gradients": kept + fresh + buffer},
        {"gathered": 0, "gradients": buffer + share, **({} if work.gpu else {"gloo": buffer})},
    ]
    return max(moments, key=total)


def _unsharded_parameters(part: _Part, work: Work) -> int:
    """Parameters as the engine counts them: layers that are cut over t count whole."""
    return part.body * work.t + part.root


def _layer_activations(model: Decoder, work: Work, layer: Layer) -> int:
    """Bytes that one layer keeps of a micro batch.

    Megatron's own layers, without its fused kernels: a norm keeps its input and what it has
    normalised in float32, and attention its softmax in float32 and in the dtype (the 5 a s / h of
    Korthikanti et al., arXiv 2205.05198, without dropout).
    """
    kept = model.kept(work.size, t=work.t, layer=layer)
    if work.backend == "megatron":
        kept += 2 * model.hidden * (FLOAT32 - work.size)
        softmax = FLOAT32 if work.size == FLOAT32 else FLOAT32 + work.size
        kept += softmax * work.length * model.heads // work.t
    return work.tokens * kept


def _saved(model: Decoder, work: Work, part: _Part) -> int:
    """Bytes that the layers of a stage keep of a micro batch.

    With activation checkpointing each layer's input, and one layer whole as it is computed again
    (Chen et al., arXiv 1604.06174).
    """
    each = {layer: _layer_activations(model, work, layer) for layer in part.kinds}
    if not work.checkpointing:
        return sum(count * each[layer] for layer, count in part.kinds.items())
    largest = max(each.values(), default=0)
    return part.layers * work.tokens * work.size * model.hidden + largest


def _last_norm(model: Decoder, work: Work) -> int:
    return work.tokens * model.hidden * (FLOAT32 + 2 * work.size)


def _logits(model: Decoder, work: Work) -> int:
    """Bytes of scoring the trained tokens, block by block of the vocabulary (engines/scoring.py):
    hidden states and their float32 gradient, one block, and the pieces that are worked on.
    """
    tokens = work.trained_tokens
    words = -(-model.vocabulary // work.t)
    block = tokens * min(words, max(1, BLOCK_BYTES // (FLOAT32 * tokens)))
    pieces = _HELD_PIECES * min(FLOAT32 * block, BLOCK_BYTES // pieces_of(work.size))
    return tokens * model.hidden * (work.size + FLOAT32) + work.size * block + pieces


def _evaluation(model: Decoder, work: Work, part: _Part) -> int:
    """Bytes of answering held-out rows by the ranks themselves, beside the state between steps.

    FSDP: the sharded model, two layers gathered at once. Megatron and pipelines: a
    copy that is sharded over all ranks, and gathered in the same way.
    """
    size, copy = work.size, 0
    if work.backend == "megatron" or work.p > 1:
        work = replace(work, backend="fsdp", d=work.d * work.t * work.p, t=1, p=1)
        part, copy = _part(model, work, 0), size * model.parameters // work.d
    one_unit = _unsharded_parameters(part, work) < ONE_UNIT_PARAMETERS
    gathered = size * (part.parameters if one_unit else part.root + 2 * part.layer)
    tokens = _EVALUATED_ROWS * work.length
    # The next token's logits: as they are made, in float32, and their softmax.
    logits = _EVALUATED_ROWS * model.vocabulary * (size + 2 * FLOAT32)
    passed = tokens * (3 * size * model.ffn // work.t + size * model.hidden)
    if model.experts:
        chosen, ffn = model.experts.chosen, model.experts.ffn
        routed = chosen * size * (3 * ffn // work.t + 2 * model.hidden)
        # On GPUs transformers generates by `batched_mm`: a copy of each row's experts.
        copies = 3 * size * _EVALUATED_ROWS * chosen * model.hidden * ffn if work.gpu else 0
        passed = max(passed, tokens * routed, copies)
    return copy + gathered + tokens * model.cache(size, t=work.t) + logits + passed
