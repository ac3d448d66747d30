"""AReaL's workflows as agents: a class with `arun_episode(engine, data)` instead of `run`.

`engine.agenerate(request)` becomes one completion of the request's token ids at `base_url`, and so
is recorded and trained like any call of an agent. The reward is what stands in `rewards` of the
returned tensors. Their tokens, masks and log-probabilities are not looked at: the engine told its
own.

AReaL makes `reward_fn`, `gconfig` and `tokenizer` of its config; here a constructor that asks for
them is given what the arguments name:

    reward_fn: package.module.function, or path/to/file.py:function
    gconfig: {max_new_tokens: 512}     # fields of GenerationHyperparameters; left out: its defaults
    tokenizer: folder or hub name      # left out: the served model's

Of AReaL only what the class itself imports is needed.
"""

import asyncio
import functools
import inspect
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from shakedown.agents.imports import load_target
from shakedown.core.errors import UsageError

_METHOD = "arun_episode"
_BUILDING = asyncio.Lock()  # a tokenizer is loaded once, also when many groups begin at once


def is_workflow(found: type) -> bool:
    """Whether a class is to be wrapped: it has AReaL's method and no `run`."""
    return hasattr(found, _METHOD) and not hasattr(found, "run")


def as_agent(workflow: type) -> type:
    """An agent class whose constructor has the workflow's arguments.

    Raises:
        UsageError: `arun_episode` is not async.
    """
    if not inspect.iscoroutinefunction(getattr(workflow, _METHOD)):
        raise UsageError(f"{workflow.__name__}.{_METHOD} is not async, expected a coroutine")
    signature = inspect.signature(workflow)
    optional = [
        each.replace(default=None) if name in ("gconfig", "tokenizer") else each
        for name, each in signature.parameters.items()
    ]
    # Those without a default first, as Python wants it; all are given by name.
    optional.sort(key=lambda each: (each.kind, each.default is not inspect.Parameter.empty))
    members = {
        "__module__": workflow.__module__,
        "__signature__": signature.replace(parameters=optional),
        "workflow": workflow,
    }
    return type(workflow.__name__, (WorkflowAgent,), members)


class WorkflowAgent:
    """One instance of a workflow, built when its first episode begins."""

    workflow: ClassVar[type]

    def __init__(self, **kwargs: Any) -> None:
        """Prepare all but the tokenizer, whose server may not be up yet.

        Raises:
            TypeError: an argument is missing, or one of `gconfig` is unknown.
            UsageError: no such reward function.
            ImportError: AReaL is not installed.
        """
        inspect.signature(type(self)).bind(**kwargs)
        self._kwargs, self._asked = kwargs, inspect.signature(self.workflow).parameters
        self._built: Any = None
        if isinstance(kwargs.get("reward_fn"), str):
            kwargs["reward_fn"] = _function(kwargs["reward_fn"])
        if "gconfig" in self._asked:
            from areal.api.cli_args import GenerationHyperparameters

            kwargs["gconfig"] = GenerationHyperparameters(**(kwargs.get("gconfig") or {}))

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        """One episode."""
        import openai

        client = openai.AsyncOpenAI(
            base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"]
        )
        served = (await client.models.list()).data[0] if self._built is None else None
        async with _BUILDING:
            if self._built is None:
                self._built = await asyncio.to_thread(self._build, served)
        engine = WorkflowEngine(client, extra.get("model") or "default")
        return rewards_of(await self._built.arun_episode(engine, data))

    def _build(self, served: Any) -> Any:
        if "tokenizer" in self._asked:
            source = self._kwargs.get("tokenizer") or getattr(served, "root", None)
            if not source:
                raise UsageError(
                    "the server does not say where its model is stored, whose tokenizer is needed",
                    hint="give the constructor's argument tokenizer: a folder or a hub name",
                )
            self._kwargs["tokenizer"] = _tokenizer(str(source))
        return self.workflow(**self._kwargs)


class WorkflowEngine:
    """The `engine` that a workflow is given."""

    def __init__(self, client: Any, model: str) -> None:
        self._client, self._model = client, model

    def get_version(self) -> int:
        """The version, always 0: the recorder knows which weights wrote a token."""
        return 0

    async def agenerate(self, req: Any) -> Any:
        """AReaL's ModelResponse to its ModelRequest, with the request that AReaL sends to vLLM.

        Raises:
            ValueError: more than one sample is asked for, images, a prompt that leaves no room, or
                the server told no token ids.
            openai.APIError: as its client.
        """
        from areal.api import ModelResponse

        asked, prompt, began = req.gconfig, list(req.input_ids), time.monotonic()
        room = min(asked.max_tokens - len(prompt), asked.max_new_tokens)
        if asked.n_samples != 1 or req.image_data or room < 1:
            raise ValueError(
                f"n_samples {asked.n_samples}, {len(req.image_data or ())} images, room for {room} "
                "tokens: expected 1 sample of a prompt of text alone, and room for a token"
            )
        reply = await self._client.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=room,
            temperature=0.0 if asked.greedy else asked.temperature,
            top_p=asked.top_p,
            frequency_penalty=asked.frequency_penalty,
            stop=asked.stop,
            logprobs=0,
            extra_body={
                "top_k": asked.top_k,
                "stop_token_ids": asked.stop_token_ids,
                "ignore_eos": asked.ignore_eos,
                "skip_special_tokens": asked.skip_special_tokens,
                "return_token_ids": True,
            },
        )
        choice = reply.choices[0]
        tokens = getattr(choice, "token_ids", None)
        if tokens is None or choice.logprobs is None:
            raise ValueError("the server's completions have no token ids: use vllm")
        return ModelResponse(
            input_tokens=prompt,
            output_tokens=list(tokens),
            output_logprobs=list(choice.logprobs.token_logprobs or ()),
            output_versions=[self.get_version()] * len(tokens),
            stop_reason=choice.finish_reason,
            tokenizer=req.tokenizer,
            latency=time.monotonic() - began,
        )


def rewards_of(result: Any) -> Any:
    """The value that `run` returns for the result of `arun_episode`.

    Args:
        result: tensors by name, of which `rewards` is read, or interactions with a `reward` each by
            completion id. Anything else comes back as it is, such as None, by which a workflow
            rejects the episode.
    """
    if isinstance(result, Mapping) and hasattr(result.get("rewards"), "reshape"):
        values = result["rewards"].reshape(-1).tolist()
        return values[0] if len(values) == 1 else {str(n): v for n, v in enumerate(values)}
    if isinstance(result, Mapping) and all(hasattr(each, "reward") for each in result.values()):
        return {name: each.reward for name, each in result.items()}
    return result


def _function(target: str) -> Any:
    """The function, named in AReaL's form or with a colon before the name as everywhere here."""
    place = target if ":" in target else ":".join(target.rpartition(".")[::2])
    module, name = load_target(place, what="reward_fn", name="function")
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"reward_fn {target!r}: {place.rpartition(':')[0]} has no such function")
    return found


@functools.lru_cache(maxsize=4)
def _tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.pad_token_id is None:  # as AReaL does
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer
