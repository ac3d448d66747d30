"""Find the layer whose weights differ: by tensors, confirmed by scores. Imports torch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shakedown.consistency.factors.bench import Bench
from shakedown.consistency.factors.table import NAMED, distance
from shakedown.consistency.factors.weights import told_folder
from shakedown.consistency.score import Reference
from shakedown.consistency.tensors import (
    ComparedTensors,
    TensorDifference,
    compare_folders,
    layer_of,
)
from shakedown.core.errors import CannotJudgeError, StorageError, UsageError
from shakedown.core.verdict import Finding

_SHOWN = 8  # tensors and layers named in a sentence


@dataclass(frozen=True)
class LayerScoring:
    """One scoring: the mean |dlogp| left with the engine's weights in these layers."""

    layers: Sequence[str]
    left: float


@dataclass(frozen=True)
class LayerFinding:
    """The layer, empty if it is not exactly one; the sentence says why.

    `tensors`: those that differ, largest first. `steps`: the scorings made.
    """

    layer: str
    sentence: str
    tensors: Sequence[TensorDifference] = ()
    steps: Sequence[LayerScoring] = ()

    def finding(self) -> Finding:
        return Finding(
            check="layer",
            status="warn" if self.layer or self.tensors or self.steps else "skip",
            subject=self.layer or "weights",
            measured=self.sentence,
            expected="the same weights on both sides",
            blame="user" if self.layer else "none",
            evidence=[each.sentence for each in self.tensors[:_SHOWN]],
            remedy="reload this layer's tensors from the other side's checkpoint, and "
            "check the code that converts or updates them"
            if self.layer
            else "",
        )


def find_layer(bench: Bench) -> LayerFinding:
    """Compare the engine's checkpoint with the reference's, tensor by tensor; then confirm.

    The engine's weights of the first k layers are put into the reference, and k is bisected for the
    point where the distance to the engine falls: log2(layers) scorings. No server reports hidden
    states, so without a readable folder one could only guess.
    """
    try:
        folder = told_folder(bench)
        own = Path(bench.plan.reference)
        if not own.is_dir():
            return LayerFinding("", f"not found: the reference {own} is not a folder")
        tensors = compare_folders(own, folder)
    except (CannotJudgeError, UsageError, StorageError) as error:
        return LayerFinding("", f"not found: {error.args[0]}")
    if not (tensors.different or tensors.missing or tensors.extra):
        return LayerFinding(
            "",
            f"not found: the {tensors.same} tensors of {folder} are the reference's; weights that "
            "the server has loaded since it started cannot be read",
        )
    try:
        return _confirmed(bench, folder, tensors)
    except (CannotJudgeError, UsageError) as error:
        reason = error.args[0]
    except torch.OutOfMemoryError:
        reason = "two models do not fit into the device's memory"
    return LayerFinding("", f"{tensors.sentence}; not confirmed: {reason}", tensors.different)


def search(
    layers: Sequence[str], left: Callable[[Collection[str]], float]
) -> tuple[str, list[LayerScoring]]:
    """Find the layer that accounts for at least half of the distance, and the scorings (pure).

    Args:
        layers: the layers whose weights differ, in the order of the forward pass.
        left: the distance left with the engine's weights in some layers.

    Returns:
        An empty name if all together explain less than half, or no single one does.
    """
    steps: list[LayerScoring] = []

    def scored(some: Sequence[str]) -> float:
        steps.append(LayerScoring(list(some), left(some)))
        return steps[-1].left

    goal = (1 - NAMED) * scored([])
    if not layers or scored(layers) > goal:
        return "", steps
    low, high = 0, len(layers)  # too few layers, and enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if scored(layers[:middle]) <= goal else (middle, high)
    found = layers[high - 1]
    alone = len(layers) == 1 or scored([found]) <= goal
    return found if alone else "", steps


def _confirmed(bench: Bench, folder: Path, tensors: ComparedTensors) -> LayerFinding:
    other = Reference(str(folder), dtype=bench.reference.dtype)
    parts = unequal(bench.reference.parameters(), other.parameters())

    def left(some: Collection[str]) -> float:
        taken = {name: value for layer in some for name, value in parts[layer].items()}
        with bench.reference.computing_with(taken):
            scores = bench.reference_scores(bench.items)
        found = distance(scores, bench.g)
        if found is None:
            raise CannotJudgeError("no token was scored on both sides")
        return found

    layer, steps = search(list(parts), left)
    return judged(layer, steps, list(parts), tensors)


def judged(
    layer: str, steps: Sequence[LayerScoring], layers: Sequence[str], tensors: ComparedTensors
) -> LayerFinding:
    """The conclusion from tensors and scorings (pure)."""
    whole = steps[0].left
    if layer:
        alone = min(step.left for step in steps if list(step.layers) == [layer])
        own = [each for each in tensors.different if layer_of(each.name) == layer]
        worst = f"{own[0].sentence}; " if own else ""
        sentence = (
            f"{layer}: with only this layer's weights from the engine mean |dlogp| falls from "
            f"{whole:.3g} to {alone:.3g}; {worst}{tensors.counts}"
        )
    elif not layers:
        sentence = f"not found: no weight used by both models differs; {tensors.sentence}"
    elif steps[1].left > (1 - NAMED) * whole:
        sentence = (
            f"not found: {tensors.sentence}; but with all of the engine's weights "
            f"{steps[1].left:.3g} of {whole:.3g} is left: the server computes with others, or in "
            "another way"
        )
    else:
        named = ", ".join(layers[:_SHOWN]) + (", ..." if len(layers) > _SHOWN else "")
        sentence = (
            f"not one layer but {len(layers)} ({named}): another checkpoint, such as an older or "
            f"newer version; {tensors.sentence}"
        )
    return LayerFinding(layer, sentence, tensors.different, steps)


def unequal(
    ours: Mapping[str, torch.nn.Parameter], theirs: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, torch.nn.Parameter]]:
    """Their differing parameters by layer, in the order of the forward pass.

    Parameters of another shape are left out. Those that both sides tie are one, in the layer of the
    first name.
    """
    parts: dict[str, dict[str, torch.nn.Parameter]] = {}
    first: dict[tuple[int, int], str] = {}
    for name, own in ours.items():
        other = theirs.get(name)
        if other is None or other.shape != own.shape or torch.equal(own, other):
            continue
        layer = first.setdefault((id(own), id(other)), layer_of(name))
        parts.setdefault(layer, {})[name] = other
    return parts
