"""Which settings of GRPO make a checkpoint another one's."""

from pathlib import Path
from typing import Any

import pytest

from shakedown.config import DriftConfig, GrpoConfig, OptimizerConfig, StageConfig
from shakedown.training.checkpoint.fingerprint import changes, differences, fingerprint
from shakedown.training.stage.job import StageJob

# Another value for every key that shapes what a checkpoint holds.
SHAPES: dict[str, Any] = {
    "temperature": 0.5,
    "agent": "my.agent:Agent",
    "agent_kwargs": {"turns": 2},
}
# For every key that shapes the updates to come alone.
TOLD: dict[str, Any] = {
    "group_size": 4,
    "max_tokens": 9,
    "ratio": "sequence",
    "mask_truncated": True,
    "overlong_tokens": 2,
    "clip_low": 0.1,
    "clip_high": 0.2,
    "epochs": 2,
    "advantage": "group_mean",
    "loss_level": "sequence",
    "drop_flat_groups": True,
    "refill_flat_groups": 3,
    "decoupled": False,
    "tis_cap": 0.0,
    "kl_coef": 0.1,
    "entropy_coef": 0.1,
    "async_level": 0,
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
    return _of(folder, grpo)


def _of(folder: Path, grpo: GrpoConfig) -> dict[str, str]:
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
    assert SHAPES.keys() | TOLD.keys() | FREE.keys() == GrpoConfig.model_fields.keys()
    assert len(SHAPES) + len(TOLD) + len(FREE) == len(GrpoConfig.model_fields)


@pytest.mark.parametrize("key", TOLD)
def test_a_setting_that_shapes_the_updates_to_come_may_change_and_is_told(
    tmp_path: Path, key: str
) -> None:
    ours = _fingerprint(tmp_path, GrpoConfig(**{key: TOLD[key]}))
    theirs = _fingerprint(tmp_path, GrpoConfig())
    older = {name: value for name, value in theirs.items() if name != f"grpo.{key}"}

    expected = {f"grpo.{key}": (theirs[f"grpo.{key}"], ours[f"grpo.{key}"])}
    assert differences(ours, theirs) == differences(ours, older) == []
    # A checkpoint from before the key came means its default.
    assert changes(ours, theirs) == changes(ours, older) == expected
    assert changes(theirs, theirs) == {}


@pytest.mark.parametrize("key", SHAPES)
def test_a_setting_that_shapes_the_state_makes_a_checkpoint_foreign(
    tmp_path: Path, key: str
) -> None:
    needed = NEEDED.get(key, {})
    ours = _fingerprint(tmp_path, GrpoConfig(**needed, **{key: SHAPES[key]}))
    theirs = _fingerprint(tmp_path, GrpoConfig(**needed))

    (found,) = differences(ours, theirs)

    assert found.startswith(f"grpo.{key}: ")


@pytest.mark.parametrize("key", FREE)
def test_a_limit_may_change_between_attempts(tmp_path: Path, key: str) -> None:
    changed = _fingerprint(tmp_path, GrpoConfig(**{key: FREE[key]}))

    assert changed == _fingerprint(tmp_path, GrpoConfig())


@pytest.mark.parametrize("key", SHAPES)
def test_a_key_that_came_later_leaves_older_checkpoints_usable_while_it_has_its_default(
    tmp_path: Path, key: str
) -> None:
    needed = NEEDED.get(key, {})
    ours = _fingerprint(tmp_path, GrpoConfig(**needed))
    older = {name: value for name, value in ours.items() if name != f"grpo.{key}"}
    changed = _fingerprint(tmp_path, GrpoConfig(**needed, **{key: SHAPES[key]}))

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


# Each may be changed below its name: a file of a stage, and what a checkpoint's owner reads of it.
CONTENTS = {
    "rows.jsonl": "data",
    "chat_template.jinja": "chat_template",
    "tokenizer.json": "tokenizer",
    "agent.py": "agent_source",
    "model-00001-of-00002.safetensors": "model",
}


@pytest.mark.parametrize("file", CONTENTS)
def test_other_contents_below_the_same_name_make_a_checkpoint_foreign_and_are_named(
    tmp_path: Path, file: str
) -> None:
    for name in CONTENTS:
        (tmp_path / name).write_bytes(b" " * 5_000_000)
    settings = GrpoConfig(agent=f"{tmp_path}/agent.py:Agent")
    theirs = _of(tmp_path, settings)

    (tmp_path / file).write_bytes(b" " * 2_500_000 + b"\n" + b" " * 2_499_999)

    (found,) = differences(_of(tmp_path, settings), theirs)
    assert found.startswith(f"{CONTENTS[file]}: sha256:")
    # A checkpoint of an earlier release says nothing of these, or by a digest of another kind.
    older = {name: value for name, value in theirs.items() if name not in CONTENTS.values()}
    assert differences(theirs, {**older, "data": "0123456789abcdef", "model": "0" * 16}) == []
