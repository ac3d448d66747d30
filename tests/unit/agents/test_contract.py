"""The agent contract: what is loaded, what is refused and why, what counts as a reward."""

import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from shakedown.agents.contract import BadReturnError, accepts_model, judge_return, load_agent
from shakedown.core.errors import UsageError

GOOD = """
class Good:
    async def run(self, data, **extra_kwargs):
        return 1.0
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading puts the agent's folder first for good, as its process is the agent's alone."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def write(folder: Path, text: str, name: str = "agent_file.py") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_class_in_a_file_is_loaded_unchanged(tmp_path: Path) -> None:
    agent = load_agent(write(tmp_path, GOOD) + ":Good")
    assert agent.__name__ == "Good"
    assert agent.__mro__ == (agent, object)


def test_a_class_in_a_module_of_the_current_folder_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, GOOD, "agent_in_cwd.py")
    monkeypatch.chdir(tmp_path)
    assert load_agent("agent_in_cwd:Good").__name__ == "Good"


def test_a_file_named_like_a_standard_module_does_not_replace_it(tmp_path: Path) -> None:
    import decimal

    load_agent(write(tmp_path, GOOD, "decimal.py") + ":Good")
    assert decimal.Decimal is Decimal


@pytest.mark.parametrize(
    ("body", "target", "said"),
    [
        (GOOD, "Goood", "did you mean 'Good'"),
        ("value = 3", "value", "is a int, expected a class"),
        ("class A:\n  def run(self, data, **k): return 1", "A", "not async"),
        ("class A:\n  async def run(self, data, **k): yield 1", "A", "async generator"),
        ("class A:\n  async def rum(self, data, **k): return 1", "A", "did you mean 'rum'"),
        ("class A:\n  async def run(self, data): return 1", "A", "unexpected keyword argument"),
        ("class A:\n  async def run(self, **k): return 1", "A", "too many positional"),
        (
            "class A:\n  def __init__(self, x): pass\n  async def run(self, data, **k): return 1",
            "A",
            "cannot be built without arguments",
        ),
        ("import no_such_module_here\nclass A: pass", "A", "no_such_module_here"),
        ("raise ValueError('at import')", "A", "at import"),
        ("import sys\nsys.exit(3)", "A", "SystemExit"),
        ("class A(:", "A", "SyntaxError"),
    ],
)
def test_what_breaks_the_contract_is_refused_with_the_reason(
    tmp_path: Path, body: str, target: str, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load_agent(f"{write(tmp_path, body)}:{target}")
    assert said in str(caught.value)


TAKES_TURNS = """
class Turns:
    def __init__(self, turns, tools=()):
        self.turns = turns + 0
    async def run(self, data, **extra_kwargs):
        return 1.0
"""


def test_a_class_whose_constructor_takes_the_arguments_is_loaded(tmp_path: Path) -> None:
    target = f"{write(tmp_path, TAKES_TURNS)}:Turns"
    assert load_agent(target, {"turns": 2}).__name__ == "Turns"


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"turn": 2}, "did you mean 'turns'"),
        ({"turn": 2}, "its signature: Turns(turns, tools=())"),
        ({"tools": []}, "missing 1 required positional argument: 'turns'"),
        ({"turns": "two"}, "can only concatenate str"),
    ],
)
def test_arguments_that_the_constructor_does_not_take_are_refused(
    tmp_path: Path, kwargs: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load_agent(f"{write(tmp_path, TAKES_TURNS)}:Turns", kwargs)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("my_agent.MyAgent", "my_agent:MyAgent"),
        ("no_such_package.sub:A", "no module 'no_such_package'"),
        ("missing.py:A", "no file missing.py"),
        (":A", "expected package.module:Class"),
    ],
)
def test_a_target_that_names_nothing_is_a_usage_error(target: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_agent(target)
    assert said in str(caught.value)


def test_model_is_offered_only_where_run_takes_it() -> None:
    class Named:
        async def run(self, data, base_url, api_key, http_client): ...  # type: ignore[no-untyped-def]

    class Keywords:
        async def run(self, data, **extra): ...  # type: ignore[no-untyped-def]

    assert not accepts_model(Named)
    assert accepts_model(Keywords)


@pytest.mark.parametrize(
    "value", [1, 0.5, -2, Fraction(1, 2), np.float32(0.5), np.int64(3), np.float64(0)]
)
def test_real_numbers_of_every_kind_are_rewards(value: object) -> None:
    reward = judge_return(value)
    assert type(reward) is float
    assert reward == float(value)  # type: ignore[arg-type]


def test_a_dict_of_numbers_by_completion_id_is_a_reward() -> None:
    assert judge_return({"chatcmpl-1": 1, "chatcmpl-2": np.float32(0.5)}) == {
        "chatcmpl-1": 1.0,
        "chatcmpl-2": 0.5,
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None"),
        (True, "bool"),
        (np.bool_(False), "bool"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ("1.0", "str"),
        (np.array([1.0]), ".item()"),
        ([1.0], "list"),
        (1j, "complex"),
        ({}, "empty dict"),
        ({"a": None}, "'a' is None"),
        ({"a": True}, "bool"),
        ({1: 1.0}, "not a completion id"),
        ({"": 1.0}, "not a completion id"),
    ],
)
def test_what_is_no_reward_is_refused_with_the_reason(value: object, said: str) -> None:
    with pytest.raises(BadReturnError) as caught:
        judge_return(value)
    assert said in str(caught.value)
