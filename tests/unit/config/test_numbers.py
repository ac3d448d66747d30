"""Numbers that no run can mean are refused at their key; so is a key that stands twice."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.config import load_config
from shakedown.config.load import parse_config
from shakedown.core.errors import ConfigError
from shakedown.training.lint import findings_of

ROOT = Path(__file__).parents[3]
DEMO: dict[str, Any] = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))


def changed(key: str, value: object) -> dict[str, Any]:
    body = copy.deepcopy(DEMO)
    *path, last = key.split(".")
    section = body
    for part in path:
        section = section.setdefault(part, {})
    section[last] = value
    return body


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stages.sft.optimizer.lr", math.inf),
        ("stages.sft.optimizer.lr", math.nan),
        ("stages.sft.optimizer.weight_decay", math.inf),
        ("stages.sft.optimizer.max_grad_norm", math.inf),
        ("stages.sft.optimizer.betas", [0.9, 1.0]),
        ("stages.sft.optimizer.betas", [-0.1, 0.9]),
        ("stages.sft.optimizer.betas", [0.9, math.nan]),
        ("stages.sft.stall_timeout", math.inf),
        ("stages.sft.sinks", ["wandb", "wandb"]),
        ("stages.grpo.grpo.temperature", math.inf),
        ("stages.grpo.grpo.clip_high", math.inf),
        ("stages.grpo.grpo.batch_timeout", math.inf),
        ("data.reward_timeout", math.inf),
        ("data.reward_memory_gb", math.inf),
        ("preflight.min_free_disk_gb", -1.0),
        ("preflight.min_shm_mb", math.nan),
        ("serve.kv_cache_gb", math.inf),
        ("seed", 2**31),
        ("run", "x" * 101),
    ],
)
def test_a_number_that_cannot_be_meant_is_refused_at_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
        parse_config(changed(key, value))


@pytest.mark.parametrize(
    ("key", "value", "subject"),
    [
        ("stages.grpo.grpo.max_tokens", 256, "stages.grpo.grpo.max_tokens"),
        ("serve.engine", "transformers", "serve.engine"),
    ],
)
def test_lint_says_what_the_server_of_a_grpo_stage_cannot_give(
    key: str, value: object, subject: str
) -> None:
    findings = findings_of(parse_config(changed(key, value)))

    assert [finding.subject for finding in findings] == [subject]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: a\nseed: 1\nrun: b\n", "'run' occurs twice"),
        ("stages:\n  sft: {steps: 1, steps: 2}\n", "'steps' occurs twice"),
        ("[" * 20_000, "nested too deeply"),
    ],
)
def test_a_file_that_says_two_things_or_none_is_refused(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=said):
        load_config(ROOT / "config/config.yaml", path)


def test_a_merged_mapping_may_be_overruled(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: &m {source: demo}\nmodel_2: &n {<<: *m, source: x}\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="model_2: unknown key"):
        load_config(ROOT / "config/config.yaml", path)
