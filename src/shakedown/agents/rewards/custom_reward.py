"""A user's own reward: `package.module:function` or `path/to/file.py:function`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from shakedown.agents.imports import load_target
from shakedown.core.errors import UsageError, did_you_mean

# Given the completion's text and the answer of the data row; higher is better.
RewardFunction = Callable[[str, str], float]
# The same with all columns of the row behind them.
RowReward = Callable[[str, str, Mapping[str, Any]], float]

_FORM = "def NAME(completion: str, answer: str) -> float, or with a third argument, the row"


def is_own(name: str) -> bool:
    """Whether `name` is a place in a user's code, not a name of the registry."""
    return ":" in name


def load_reward(target: str) -> RewardFunction:
    """Import a user's reward and check its form, without calling it.

    Raises:
        UsageError: no such module, file or function; an import that fails; a function that is
            async or cannot be called with two texts, nor with a row behind them.
    """
    module, name = load_target(target, what="reward", name="function")
    reward = getattr(module, name, None)
    if reward is None:
        functions = [key for key, item in vars(module).items() if inspect.isfunction(item)]
        raise UsageError(
            f"{target}: no {name!r} there{did_you_mean(name, functions)}; "
            f"functions: {', '.join(functions) or 'none'}"
        )
    if not callable(reward) or inspect.isclass(reward):
        raise UsageError(f"{target} is a {type(reward).__name__}, expected a function", hint=_FORM)
    if inspect.iscoroutinefunction(reward) or inspect.isasyncgenfunction(reward):
        raise UsageError(f"{target} is async; rewards run in processes of their own", hint=_FORM)
    try:
        _takes_row(reward)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{target} cannot be called with a completion and an answer: {error}", hint=_FORM
        ) from error
    return cast("RewardFunction", reward)


def with_row(reward: RewardFunction) -> RowReward:
    """The reward as one that is given the row, too; it gets it if it takes it."""
    if _takes_row(reward):
        return cast("RowReward", reward)
    return lambda completion, answer, _row: reward(completion, answer)


def _takes_row(reward: Callable[..., Any]) -> bool:
    """Whether it has a third argument that must be given, or is called `row`.

    Raises:
        TypeError, ValueError: it takes neither two nor three.
    """
    signature = inspect.signature(reward)
    try:
        signature.bind("completion", "answer")
    except TypeError:
        signature.bind("completion", "answer", {})
        return True
    return [*signature.parameters][2:3] == ["row"]
