"""Rules of lint beside the table of cases: hostile files, users' code, tables that must agree."""

import asyncio
import inspect
import json
import time
from pathlib import Path

import pytest

from shakedown.agents.agent_pool import agent_fault
from shakedown.agents.reward_pool import RewardFailure
from shakedown.cli import main
from shakedown.config import load_config
from shakedown.inference.idle_limit import IdleTimer
from shakedown.rollout.agent_sampler import ENGINE
from shakedown.training.engines import ENGINES, FAMILIES, OPTIONS
from shakedown.training.engines.tensor_parallel import PLANS
from shakedown.training.lint import findings_of
from shakedown.training.lint_rules import lengths, server, times
from shakedown.training.lint_rules.model_sizes import demo_sizes, read_sizes
from shakedown.training.lint_rules.own_code import is_plain_agent, judge_calls

ROOT = Path(__file__).parents[3]
RUN = "    async def run(self, data, **given):\n        return 1.0\n"


def test_what_lint_knows_of_other_modules_is_what_they_have() -> None:
    assert set(PLANS) == set(FAMILIES)
    assert ENGINES.keys() == OPTIONS.keys()
    assert inspect.signature(IdleTimer).parameters["every"].default == times.RENEWED_EVERY
    assert server.AGENT_ENGINE == ENGINE


def test_the_values_of_the_demo_are_those_of_its_config() -> None:
    config = load_config(ROOT / "config" / "config.yaml")
    grpo = config.own_stages["grpo"].grpo

    assert grpo is not None
    assert (grpo.max_tokens, config.serve.max_model_len) == (
        lengths.DEMO_ANSWER,
        lengths.DEMO_LENGTH,
    )
    assert {s.algorithm: s.optimizer.lr for s in config.own_stages.values()} == lengths.DEMO_RATES


def test_the_demo_model_has_the_sizes_that_lint_judges_by(tmp_path: Path) -> None:
    from shakedown.training.demo import write_model

    write_model(tmp_path / "model", seed=0)

    assert read_sizes(tmp_path / "model") == demo_sizes()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1, 2]",
        '"llama"',
        "{" * 100_000,
        "\x00\xff",
        json.dumps({"model_type": 7, "num_attention_heads": "8", "rope_scaling": [1]}),
        json.dumps({"num_attention_heads": 0, "num_key_value_heads": -3, "text_config": None}),
        json.dumps({"num_attention_heads": True, "max_position_embeddings": 1e400}),
        json.dumps({"max_position_embeddings": 10_000, "rope_scaling": {"factor": float("nan")}}),
        json.dumps(
            {"max_position_embeddings": 10_000, "rope_scaling": {"rope_type": [], "factor": 2}}
        ),
        '{"max_position_embeddings": ' + "9" * 5000 + "}",
    ],
)
def test_a_hostile_config_of_a_model_is_a_fault_or_says_nothing(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "model.safetensors").touch()
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(f"model: {{source: '{tmp_path}'}}\n", encoding="utf-8")
    monkeypatch.chdir(ROOT)

    found = findings_of(load_config(Path("config/config.yaml"), overlay))

    assert {f.subject for f in found if f.status == "fail"} <= {"model.source"}


@pytest.mark.parametrize(
    ("body", "plain"),
    [
        (f"class Mine:\n{RUN}", True),
        (f"import openai\n\n\nclass Mine:\n{RUN}", True),
        (f"class Mine(object):\n{RUN}", False),
        (f"@final\nclass Mine:\n{RUN}", False),
        (f"class Mine:\n    def __init__(self, x):\n        self.x = x\n\n{RUN}", False),
        ("class Mine:\n    async def run(self, data):\n        return 1.0\n", False),
        ("class Mine:\n    async def run(self, data, **given):\n        yield 1.0\n", False),
        ("class Mine:\n    def run(self, data, **given):\n        return 1.0\n", False),
        ("from elsewhere import Mine\n", False),
        ("class Mine:\n    async def run(", False),
    ],
)
def test_an_agent_is_plain_where_its_file_shows_all_of_it(
    tmp_path: Path, body: str, plain: bool
) -> None:
    (tmp_path / "own.py").write_text(body, encoding="utf-8")

    assert is_plain_agent(f"{tmp_path}/own.py:Mine") is plain


def test_the_import_of_an_agent_that_never_ends_is_ended(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    began = time.monotonic()

    fault = asyncio.run(agent_fault(f"{tmp_path}/own.py:Mine", seconds=1.0))

    assert "was not imported within 1 s" in fault
    assert time.monotonic() - began < 60


def test_the_import_of_an_agent_happens_in_a_process_of_its_own(tmp_path: Path) -> None:
    text = "import os\nprint('noise')\nos._exit(7)\n"
    (tmp_path / "own.py").write_text(text, encoding="utf-8")

    fault = asyncio.run(agent_fault(f"{tmp_path}/own.py:Mine", seconds=30.0))

    assert "the worker ended with exit code 7" in fault


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([0.0, 1.0, 1.0], None),
        ([1.0, 1.0], "warn"),
        ([RewardFailure("bad_return", "the reward is None")] * 2, "fail"),
        ([0.0, RewardFailure("bad_return", "the reward is None")], "warn"),
        ([RewardFailure("exception", "NameError: name 'x' is not defined (f.py:2)")], "fail"),
        ([RewardFailure("exception", "TypeError: 'NoneType' object is not ...")], "warn"),
        ([RewardFailure("exception", "ConnectionRefusedError: no judge")], "warn"),
        ([RewardFailure("timeout", "no reward within 5 s")], "warn"),
        ([RewardFailure("exit", "the worker ended with exit code 1")], "fail"),
        ([], None),
    ],
)
def test_only_a_reward_that_can_never_work_is_refused(
    results: list[float | RewardFailure], status: str | None
) -> None:
    found = judge_calls("own.py:reward", results)

    assert [f.status for f in found] == ([status] if status else [])


@pytest.mark.parametrize(
    "words", ["[--api-key=S3CRET]", "['--api-key S3CRET']", "[--api-key, S3CRET]"]
)
def test_a_key_among_the_options_is_refused_and_not_shown(
    tmp_path: Path,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(f"serve: {{extra_args: {words}}}\n", encoding="utf-8")

    code = main(["lint", str(overlay)])

    told = capsys.readouterr()
    assert code == 2
    assert "serve.extra_args" in told.out
    assert "S3CRET" not in told.out + told.err


def test_an_answer_shorter_than_the_demos_is_the_users_own_value(tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    for length, told in ((6, False), (lengths.DEMO_ANSWER, True)):
        overlay.write_text(
            f"run: six\nmodel: {{source: {tmp_path}, dtype: float32}}\n"
            f"stages: {{grpo: {{optimizer: {{lr: 3.0e-4}}, grpo: {{max_tokens: {length}}}}}}}\n"
        )
        config = load_config(ROOT / "config" / "config.yaml", overlay)
        demo = [each.subject for each in findings_of(config) if each.check == "demo"]
        assert ("stages.grpo.grpo.max_tokens" in demo) is told
