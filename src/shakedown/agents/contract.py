"""The agent contract: load a class, check it without running it, judge what it returned.

An agent is any class with `async def run(self, data, **extra_kwargs)` that returns a reward, or
a dict of rewards by completion id. It is never changed, wrapped or subclassed.
"""

import inspect
import math
import numbers
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from shakedown.agents.areal_workflow import as_agent, is_workflow
from shakedown.agents.imports import last_frame, load_target
from shakedown.core.errors import UsageError, did_you_mean

# Keyword arguments that every agent is given; AReaL gives the same three.
EXTRA_KWARGS = ("base_url", "api_key", "http_client")

Reward = float | dict[str, float]


class BadReturnError(ValueError):
    """An agent returned something that is not a reward."""


class AgentExitError(Exception):
    """An agent called sys.exit."""


def load_agent(target: str, kwargs: Mapping[str, Any] | None = None) -> type:
    """Import `package.module:Class` or `path/to/file.py:Class` and check the contract.

    A workflow of AReaL comes back as an agent.

    Args:
        kwargs: for the constructor.

    Raises:
        UsageError: no such module or class, an import that fails, a `run` that is not async or
            does not take the keyword arguments, a class that cannot be built with `kwargs`.
    """
    module, name = load_target(target, what="agent target", name="Class")
    place = target.rpartition(":")[0]
    agent = getattr(module, name, None)
    if agent is None:
        classes = _classes(module)
        raise UsageError(
            f"{place} has no {name!r}{did_you_mean(name, classes)}; "
            f"classes there: {', '.join(classes) or 'none'}"
        )
    if not inspect.isclass(agent):
        raise UsageError(f"{target} is a {type(agent).__name__}, expected a class with `run`")
    if is_workflow(agent):
        agent = as_agent(agent)
    check_contract(agent, target, kwargs or {})
    return agent


def check_contract(agent: type, target: str, kwargs: Mapping[str, Any]) -> None:
    """Check `run` and build one instance with `kwargs`, without calling `run`.

    Raises:
        UsageError: says what about the class breaks the contract.
    """
    run = getattr(agent, "run", None)
    if run is None:
        methods = [name for name in vars(agent) if not name.startswith("_")]
        raise UsageError(
            f"{target} has no `run`{did_you_mean('run', methods)}",
            hint="give the class: async def run(self, data, **extra_kwargs)",
        )
    if not inspect.iscoroutinefunction(run):
        kind = "an async generator" if inspect.isasyncgenfunction(run) else "not async"
        raise UsageError(
            f"{target}: `run` is {kind}, expected a coroutine that returns a reward",
            hint="write: async def run(self, data, **extra_kwargs)",
        )
    instance = _built(agent, target, kwargs)
    try:
        inspect.signature(instance.run).bind({}, **dict.fromkeys(EXTRA_KWARGS))
    except TypeError as error:
        raise UsageError(
            f"{target}: `run{inspect.signature(instance.run)}` cannot be called with data and "
            f"the keyword arguments {', '.join(EXTRA_KWARGS)}: {error}",
            hint="write: async def run(self, data, **extra_kwargs)",
        ) from error


def _built(agent: type, target: str, kwargs: Mapping[str, Any]) -> Any:
    _check_names(agent, target, kwargs)
    try:
        return agent(**kwargs)
    except Exception as error:  # the user's constructor may raise anything
        given = f"with the arguments {', '.join(kwargs)}" if kwargs else "without arguments"
        raise UsageError(
            f"{target} cannot be built {given}: {type(error).__name__}: {error}"
            f" ({last_frame(error)})",
            hint="give every argument of __init__ a default, or set it: agents.kwargs and "
            "grpo.agent_kwargs in a config, --kwargs of `shakedown agent run`",
        ) from error


def _check_names(agent: type, target: str, kwargs: Mapping[str, Any]) -> None:
    """Check for wrong names alone: a missing argument shows when the class is built."""
    try:
        signature = inspect.signature(agent)
    except (TypeError, ValueError):  # built in C, or by a metaclass that tells nothing
        return
    try:
        signature.bind_partial(**kwargs)
    except TypeError as error:
        names = [name for name in kwargs if name not in signature.parameters]
        meant = did_you_mean(names[0], list(signature.parameters)) if names else ""
        raise UsageError(
            f"{target} cannot be built with the arguments {', '.join(kwargs)}: {error}{meant}; "
            f"its signature: {agent.__name__}{signature}",
            hint="correct agents.kwargs or grpo.agent_kwargs in the config, or --kwargs",
        ) from None


def accepts_model(agent: type) -> bool:
    """Whether `run` takes the keyword `model`: the name that the server answers to."""
    parameters = inspect.signature(agent.run).parameters.values()  # type: ignore[attr-defined]
    kinds = {parameter.kind for parameter in parameters}
    named = {parameter.name for parameter in parameters}
    return inspect.Parameter.VAR_KEYWORD in kinds or "model" in named


def judge_return(value: object) -> Reward:
    """Return the reward as a float, or as a dict of floats by completion id.

    Real numbers of any kind count (int, Fraction, numpy's scalars).

    Raises:
        BadReturnError: bool, None, text, NaN, infinity, arrays, an empty dict, a bad key.
    """
    if not isinstance(value, dict):
        return judge_number(value, "the reward")
    if not value:
        raise BadReturnError("an empty dict rewards no completion; return {completion.id: reward}")
    for key in value:
        if not isinstance(key, str) or not key:
            raise BadReturnError(f"reward key {key!r:.60} is not a completion id (text)")
    return {key: judge_number(item, f"the reward of {key!r:.60}") for key, item in value.items()}


def judge_number(value: object, what: str) -> float:
    """Return a real number of any kind as a finite float; `what` names it in messages.

    Raises:
        BadReturnError: bool, None, text, NaN, infinity, arrays.
    """
    name = type(value).__name__
    if value is None:
        raise BadReturnError(f"{what} is None: does every branch end in `return reward`?")
    if isinstance(value, bool) or name in ("bool", "bool_"):
        raise BadReturnError(f"{what} is a bool ({value}): return float(...) to say what is meant")
    if not isinstance(value, numbers.Real):
        advice = "return value.item()" if hasattr(value, "item") else "return a number"
        raise BadReturnError(f"{what} is a {name} ({value!r:.60}): {advice}")
    number = float(value)
    if not math.isfinite(number):
        raise BadReturnError(f"{what} is {number}: one such value spoils a whole batch's advantage")
    return number


def _classes(module: ModuleType) -> list[str]:
    return [
        name
        for name, item in vars(module).items()
        if inspect.isclass(item) and item.__module__ == module.__name__
    ]


def one_number(reward: Reward) -> float:
    """An episode's reward; a dict by completion id counts as its mean."""
    return sum(reward.values()) / len(reward) if isinstance(reward, dict) else reward
