"""The search for a layer against a made distance, and what tensors and scorings say together."""

from collections.abc import Callable, Collection, Mapping

import pytest

from shakedown.consistency.layers import LayerScoring, judged, search
from shakedown.consistency.tensors import ComparedTensors, TensorDifference

LAYERS = [f"model.layers.{number}" for number in range(12)]


def distance(shares: Mapping[str, float], rest: float = 0.0) -> Callable[[Collection[str]], float]:
    """Each layer adds its share to the distance until the engine's weights are in its place."""
    return lambda taken: rest + sum(size for name, size in shares.items() if name not in taken)


@pytest.mark.parametrize("guilty", LAYERS)
def test_the_one_layer_is_found_in_few_scorings(guilty: str) -> None:
    shares = dict.fromkeys(LAYERS, 0.001) | {guilty: 1.0}

    layer, steps = search(LAYERS, distance(shares))

    assert layer == guilty
    assert len(steps) <= 7  # none, all, 4 of the bisection, it alone


def test_the_only_layer_that_differs_takes_two_scorings() -> None:
    layer, steps = search(["lm_head"], distance({"lm_head": 1.0}))

    assert layer == "lm_head"
    assert [step.left for step in steps] == [1.0, 0.0]


def test_two_layers_alike_are_not_one() -> None:
    shares = {LAYERS[2]: 1.0, LAYERS[8]: 1.1, LAYERS[9]: 1.0}

    assert search(list(shares), distance(shares))[0] == ""


def test_layers_that_explain_less_than_half_are_not_named() -> None:
    layer, steps = search([LAYERS[0]], distance({LAYERS[0]: 0.4}, rest=0.6))

    assert layer == ""
    assert [step.left for step in steps] == [1.0, 0.6]


def test_where_no_parameter_differs_one_scoring_is_all() -> None:
    assert search([], distance({}, rest=1.0)) == ("", [LayerScoring([], 1.0)])


def tensors(*names: str) -> ComparedTensors:
    different = [TensorDifference(f"{name}.up.weight", 0.05, 1.05) for name in names]
    return ComparedTensors(30, 0, different, (), (), ("F32", "F32"))


def test_a_found_layer_is_told_with_its_tensor_and_its_scores() -> None:
    steps = [LayerScoring([], 0.05), LayerScoring(LAYERS[3:4], 1e-6)]

    found = judged(LAYERS[3], steps, LAYERS[3:4], tensors(LAYERS[3])).finding()

    assert (found.status, found.subject) == ("warn", "model.layers.3")
    for said in ("from 0.05 to 1e-06", "up.weight is 1.05 times", "1 of 31 tensors differ"):
        assert said in str(found.measured)


def test_many_layers_are_told_as_another_checkpoint() -> None:
    steps = [LayerScoring([], 0.05), LayerScoring(LAYERS, 1e-6), LayerScoring(LAYERS[:6], 0.02)]

    found = judged("", steps, LAYERS, tensors(*LAYERS)).finding()

    assert found.subject == "weights"
    assert "not one layer but 12" in str(found.measured)
    assert "another checkpoint" in str(found.measured)


def test_tensors_that_do_not_explain_the_scores_are_not_blamed() -> None:
    steps = [LayerScoring([], 0.05), LayerScoring(LAYERS[:1], 0.04)]

    found = judged("", steps, LAYERS[:1], tensors(LAYERS[0])).finding()

    assert (found.subject, found.blame) == ("weights", "none")
    assert "not found" in str(found.measured)
    assert "0.04 of 0.05 is left" in str(found.measured)


def test_tensors_that_no_model_computes_with_are_not_blamed() -> None:
    found = judged("", [LayerScoring([], 0.05)], [], tensors(LAYERS[0]))

    assert found.layer == ""
    assert "no weight used by both models differs" in found.sentence
