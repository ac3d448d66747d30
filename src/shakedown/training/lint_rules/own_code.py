"""A user's reward and agent, tried as the run will use them: in processes of their own.

The one part of lint that runs something: only code that the run itself would run.
"""

import ast
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from shakedown.agents.agent_pool import agent_fault
from shakedown.agents.reward_pool import RewardFailure, RewardLimits, RewardPool
from shakedown.agents.rewards import is_own
from shakedown.core.errors import ShakedownError
from shakedown.core.verdict import Finding
from shakedown.data_sources import AnsweredRow
from shakedown.training.lint_rules.data import FORMS, uses_reward
from shakedown.training.lint_rules.inputs import Inputs, advice, fault

_CALL_SECONDS = 5.0  # of all calls of a reward together; the run allows data.reward_timeout each
_IMPORT_SECONDS = 20.0
_ROWS = 3
_LONGEST = 1 << 20  # bytes of a file that is parsed
# Of an import: wrong on every node.
_CODE_ERRORS = ("SyntaxError", "IndentationError", "NameError", "cannot import name")
# Of a call: not the text's fault, nor that of a service that is out of reach here.
_PROGRAM_ERRORS = ("NameError", "UnboundLocalError", "TypeError")


async def own_code(inputs: Inputs) -> list[Finding]:
    """Faults of the user's reward and agents; nothing is started for a plain class."""
    config = inputs.config
    agents = {"agents.target": (config.agents.target, config.agents.kwargs)}
    for key, stage in inputs.stages:
        if stage.grpo and stage.grpo.agent:
            agents[f"{key}.grpo.agent"] = (stage.grpo.agent, stage.grpo.agent_kwargs)
    tried: dict[str, asyncio.Task[str]] = {}  # by target and arguments: most runs have one agent
    async with asyncio.TaskGroup() as tasks:
        for target, kwargs in agents.values():
            name = _name(target, kwargs)
            if name not in tried and not is_plain_agent(target, kwargs):
                fault_of = agent_fault(target, kwargs, seconds=_IMPORT_SECONDS)
                tried[name] = tasks.create_task(fault_of)
    why = {name: task.result() for name, task in tried.items()}
    found = [
        _agent(key, target, why[name])
        for key, (target, kwargs) in agents.items()
        if why.get(name := _name(target, kwargs))
    ]
    return [*await _reward(inputs), *found]


def _name(target: str, kwargs: Mapping[str, Any]) -> str:
    return target + json.dumps(kwargs, sort_keys=True)


def _agent(key: str, target: str, why: str) -> Finding:
    """An import that fails here may go well where the job runs: packages, devices, variables."""
    failed = why.startswith("importing ") and not any(name in why for name in _CODE_ERRORS)
    missing = ".py:" not in target and why.startswith("no module")
    elsewhere = failed or missing or "was not imported within" in why
    expected = "a class with `async def run(self, data, **extra_kwargs)`"
    told = advice if elsewhere else fault
    return told("agent", key, target, expected, why)


def is_plain_agent(target: str, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the file shows an agent beyond doubt; what is inherited or made is not plain.

    Nor is a class that is given arguments: its constructor is to be looked at.

    A target of another form, or whose file is not there, counts as plain: it has been told of.
    """
    place, _, name = target.rpartition(":")
    if not name.isidentifier() or not place:
        return True
    if not place.endswith(".py"):
        return False
    path = Path(place)
    if not path.is_file():
        return True
    if kwargs:
        return False
    try:
        with path.open("rb") as stream:
            module = ast.parse(stream.read(_LONGEST))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    named = [node for node in module.body if getattr(node, "name", "") == name]
    return len(named) == 1 and isinstance(named[0], ast.ClassDef) and _is_plain(named[0])


def _is_plain(agent: ast.ClassDef) -> bool:
    if agent.bases or agent.keywords or agent.decorator_list:
        return False
    methods = {node.name: node for node in agent.body if hasattr(node, "name")}
    run = methods.get("run")
    if not isinstance(run, ast.AsyncFunctionDef) or run.decorator_list or "__init__" in methods:
        return False
    given = run.args
    takes_all = len(given.posonlyargs + given.args) == len(("self", "data")) and given.kwarg
    needs_more = len(given.kwonlyargs) > sum(each is not None for each in given.kw_defaults)
    yields = any(isinstance(node, ast.Yield) for node in ast.walk(run))
    return bool(takes_all) and not needs_more and not yields


async def _reward(inputs: Inputs) -> list[Finding]:
    data = inputs.config.data
    if not is_own(data.reward) or not uses_reward(inputs):
        return []
    limits = RewardLimits(min(data.reward_timeout, _CALL_SECONDS), data.reward_memory_gb)
    rows = [row for row in inputs.train.first[:_ROWS] if isinstance(row, AnsweredRow)]
    results: list[float | RewardFailure] = []
    expected = "a function (completion, answer) or (completion, answer, row) -> float"
    try:
        async with RewardPool(data.reward, limits, workers=1) as pool:
            end = time.monotonic() + _CALL_SECONDS
            for row, form in product(rows, ("", *FORMS)):
                results += await pool.score([form.format(row.answer)], row.answer, row.columns)
                if time.monotonic() > end:
                    break
    except ShakedownError as error:
        return [fault("reward", "data.reward", data.reward, expected, str(error))]
    return judge_calls(data.reward, results)


def judge_calls(reward: str, results: Sequence[float | RewardFailure]) -> list[Finding]:
    """Findings of calling a reward with an empty answer and with right ones in usual forms.

    It may want a form of its own, or a service that is out of reach here: it is wrong only where
    every call failed as no text and no service makes it fail.
    """
    failures = [result for result in results if isinstance(result, RewardFailure)]
    if not failures and len(results) > 1 and len(set(results)) == 1:
        expected = "more for a right answer than for an empty one"
        remedy = f"all of {len(results)} calls gave {results[0]}: does it want a form of its own?"
        return [advice("reward", "data.reward", reward, expected, remedy)]
    if not failures:
        return []
    first = failures[0]
    in_program = first.detail.startswith(_PROGRAM_ERRORS) and "NoneType" not in first.detail
    wrong = first.cause in ("bad_return", "exit", "memory") or in_program
    told = fault if wrong and len(failures) == len(results) else advice
    expected = "a finite number for each right answer to the first rows"
    remedy = f"{len(failures)} of {len(results)} calls failed; {first}"
    return [told("reward", "data.reward", reward, expected, remedy)]
