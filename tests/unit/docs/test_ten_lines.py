"""docs/training.md, "In ten lines": every overlay is laid over the shipped config and judged."""

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shakedown.agents.contract import load_agent
from shakedown.agents.reward_pool import RewardLimits, score_rows
from shakedown.config import Config, load_config
from shakedown.data_sources.conversations import load_rows
from shakedown.training.lint import faults_of, findings_of

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "config" / "config.yaml"
NAMES = ("my-model", "my-data", "my-reward", "my-agent")


@dataclass(frozen=True)
class Recipe:
    """An overlay, and the files that the text shows before it."""

    overlay: str
    files: dict[str, str]


def _recipes() -> dict[str, Recipe]:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    section = page.split("\n## In ten lines\n")[1].split("\n## ")[0]
    found: dict[str, Recipe] = {}
    files: dict[str, str] = {}
    for path, language, body in re.findall(
        r"(?:`([^`\n]+)`:\n\n)?```(\w+)\n(.*?)```", section, flags=re.DOTALL
    ):
        if language == "yaml":
            found[body.split("\n")[0].removeprefix("run: ")] = Recipe(body, files)
            files = {}
        else:
            files[path] = body
    return found


RECIPES = _recipes()


@pytest.fixture
def laid(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The config of one recipe, in a folder with the files that the text shows."""
    recipe = RECIPES[request.param]
    files = {**recipe.files, "mine.yaml": recipe.overlay}
    if request.param == "my-model":
        files["models/mine/config.json"] = json.dumps({"model_type": "qwen3"})
        files["models/mine/tokenizer.json"] = "{}"
        files["models/mine/model.safetensors"] = "\2\0\0\0\0\0\0\0{}"  # of no tensor
    for name in ("examples/my_agent.py", "config.yaml"):
        files[f"config/{name}"] = (ROOT / "config" / name).read_text(encoding="utf-8")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return load_config(Path("config/config.yaml"), Path("mine.yaml"))


def test_the_section_has_one_recipe_of_each_kind_in_ten_lines() -> None:
    assert tuple(RECIPES) == NAMES
    for recipe in RECIPES.values():
        for text in (recipe.overlay, *recipe.files.values()):
            assert len(text.strip().splitlines()) <= 10


@pytest.mark.parametrize("laid", NAMES, indirect=True)
def test_a_recipe_is_sound(laid: Config) -> None:
    # The two rows of its text are fewer than a batch: a warning.
    assert faults_of(findings_of(laid)) == []


@pytest.mark.parametrize(
    ("laid", "gone", "subject"),
    [
        ("my-model", "models/mine/config.json", "model.source"),
        ("my-data", "data/mine.jsonl", "data.train"),
        ("my-reward", "rewards/mine.py", "data.reward"),
        ("my-agent", "agents/mine.py", "agents.target"),
    ],
    indirect=["laid"],
)
def test_a_recipe_without_its_file_is_refused_at_its_key(
    laid: Config, gone: str, subject: str
) -> None:
    Path(gone).unlink()

    assert findings_of(laid)[0].subject == subject


@pytest.mark.parametrize("laid", ["my-data"], indirect=True)
def test_the_rows_of_the_recipe_are_read(laid: Config) -> None:
    assert [row.answer for row in load_rows(laid.data.train)] == ["8", "4"]


@pytest.mark.parametrize("laid", ["my-reward"], indirect=True)
def test_the_reward_of_the_recipe_judges_answers(laid: Config) -> None:
    limits = RewardLimits(laid.data.reward_timeout, laid.data.reward_memory_gb)
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("They have 8.", "8", {}),
        ("8 or 9", "8", {}),
        ("", "8", {}),
    ]

    found = asyncio.run(score_rows(laid.data.reward, rows, limits, progress=lambda: None))

    assert found == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("laid", ["my-agent"], indirect=True)
def test_the_agent_of_the_recipe_keeps_the_contract(laid: Config) -> None:
    grpo = laid.own_stages["grpo"].grpo

    assert grpo is not None
    assert grpo.agent == laid.agents.target
    assert load_agent(grpo.agent).__name__ == "Mine"
