"""Which settings of two config.json differ, and that the reference computes with the server's."""

import json
import shutil
from pathlib import Path

import pytest

from shakedown.consistency.factors.bench import NoDifferenceError
from shakedown.consistency.factors.settings import changed, config
from tests.unit.consistency.test_find_layer import bench, own

__all__ = ["own"]


def test_only_settings_that_change_a_forward_pass_are_told() -> None:
    ours = {"rms_norm_eps": 1e-6, "dtype": "float32", "rope": {"rope_theta": 1e4}, "same": [1]}
    theirs = {"rms_norm_eps": 1e-5, "dtype": "bfloat16", "rope": {"rope_theta": 1e6}, "same": [1]}

    assert changed(ours, theirs) == [
        "rms_norm_eps 1e-06 -> 1e-05",
        "rope.rope_theta 10000.0 -> 1000000.0",
    ]


def test_a_setting_that_one_side_lacks_differs() -> None:
    assert changed({"sliding_window": 128}, {}) == ["sliding_window 128 -> None"]


@pytest.mark.slow
def test_the_same_weights_with_another_rope_theta_are_all_of_the_difference(
    own: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(own, theirs)
    body = json.loads((theirs / "config.json").read_text())
    body["rope_parameters"]["rope_theta"] = 100.0
    (theirs / "config.json").write_text(json.dumps(body))
    looked = bench(own, theirs, theirs)

    found = config(looked)

    assert found.note == "rope_parameters.rope_theta 10000.0 -> 100.0"
    for scores, engine, reference in zip(found.scores_b, looked.g, looked.t, strict=True):
        assert abs(scores - engine).max() < 1e-6 < abs(reference - engine).max()


@pytest.mark.slow
def test_one_config_on_both_sides_is_no_factor(own: Path) -> None:
    with pytest.raises(NoDifferenceError):
        config(bench(own, own, own))
