"""Which settings of GRPO make a checkpoint another one's."""

from pathlib import Path
from typing import Any

import pytest

from shakedown.config import DriftConfig, GrpoConfig, OptimizerConfig, StageConfig
from shakedown.training.checkpoint.fingerprint import differences, fingerprint
from shakedown.training.stage.job import StageJob

# Another value for every key that changes what is learned.
CHANGES: dict[str, Any] = {
    "group_size": 4,
    "max_tokens": 9,
    "temperature": 0.5,
    "clip_low": 0.1,
    "clip_high": 0.2,
    "epochs": 2,
    "advantage": "group_mean",
    "loss_level": "sequence",
    "drop_flat_groups": True,
    "decoupled": False,
    "tis_cap": 0.0,
    "kl_coef": 0.1,
    "entropy_coef": 0.1,
    "async_level": 0,
    "agent": "my.agent:Agent",
    "agent_kwargs": {"turns": 2},
    "partial_rollouts": True,
}
# What a key is refused without.
NEEDED: dict[str, Any] = {"agent_kwargs": {"agent": "my.agent:Agent"}}
# And for every key that changes nothing in what is learned.
FREE: dict[str, Any] = {
    "max_concurrent": 64,
    "agent_timeout": 1.0,
    "batch_timeout": 1.0,
    "weight_update_timeout": 1.0,
    "record": True,
    "drift": DriftConfig(action="stop"),
}


def _fingerprint(folder: Path, grpo: GrpoConfig) -> dict[str, str]:
    (folder / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    stage = StageConfig(
        algorithm="grpo",
        allocation="fsdp:d1",
        steps=1,
        batch_size=1,
        optimizer=OptimizerConfig(lr=0.1),
        grpo=grpo,
    )
    rows = str(folder / "rows.jsonl")
    return fingerprint(StageJob("s", stage, str(folder), "float32", rows, rows, "r", 0, 1, "", ""))


def test_every_setting_is_known_to_change_the_result_or_not() -> None:
    assert CHANGES.keys() | FREE.keys() == GrpoConfig.model_fields.keys()
    assert not CHANGES.keys() & FREE.keys()


@pytest.mark.parametrize("key", CHANGES)
def test_a_setting_that_changes_the_result_makes_a_checkpoint_foreign(
    tmp_path: Path, key: str
) -> None:
    needed = NEEDED.get(key, {})
    ours = _fingerprint(tmp_path, GrpoConfig(**needed, **{key: CHANGES[key]}))
    theirs = _fingerprint(tmp_path, GrpoConfig(**needed))

    (found,) = differences(ours, theirs)

    assert found.startswith(f"grpo.{key}: ")


@pytest.mark.parametrize("key", FREE)
def test_a_limit_may_change_between_attempts(tmp_path: Path, key: str) -> None:
    changed = _fingerprint(tmp_path, GrpoConfig(**{key: FREE[key]}))

    assert changed == _fingerprint(tmp_path, GrpoConfig())


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_came_later_leaves_older_checkpoints_usable_while_it_has_its_default(
    tmp_path: Path, key: str
) -> None:
    needed = NEEDED.get(key, {})
    ours = _fingerprint(tmp_path, GrpoConfig(**needed))
    older = {name: value for name, value in ours.items() if name != f"grpo.{key}"}
    changed = _fingerprint(tmp_path, GrpoConfig(**needed, **{key: CHANGES[key]}))

    assert differences(ours, older) == []
    (found,) = differences(changed, older)
    assert found.startswith(f"grpo.{key}: nothing there, ")


def test_a_key_that_may_change_by_now_does_not_make_an_older_checkpoint_foreign(
    tmp_path: Path,
) -> None:
    ours = _fingerprint(tmp_path, GrpoConfig())

    assert differences(ours, ours | {"grpo.max_concurrent": "7"}) == []
    assert differences(ours, ours | {"grpo.unknown": "7"}) == [
        "grpo.unknown: 7 there, nothing here"
    ]
