"""Try a part of a run here: `python -m shakedown.training.smoke_test KIND NAME [KWARGS]`.

Exit code 0 when it works; else the reason is the last line of standard error: 1 when it cannot be
loaded or breaks its contract, 3 when its own code raised, maybe at the made-up question. KIND is

- `reward`: called once, with an empty completion, in a process of its own;
- `agent`: built with KWARGS, a JSON object, and run once, against a server that answers every call
  alike, in each protocol that training knows; --model is the folder that it says it serves;
- `sink`: its package and its settings are looked up, nothing is sent.
"""

import argparse
import asyncio
import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from shakedown.agents.agent_pool import AgentPool, AgentSetup
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.reward_pool import NO_COLUMNS, RewardFailure, RewardLimits, score_rows
from shakedown.core.errors import ExitCode, ShakedownError
from shakedown.core.http import LOOPBACK, Handler, application, in_thread, listening
from shakedown.rollout.protocols import PROTOCOLS
from shakedown.training.metrics.sinks import require_sinks

_ROW = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}
_REPLY = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "The answer is 4."},
            "logprobs": {"content": []},
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 0,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "text": "4",
            "token_ids": [1],
            "logprobs": {"token_logprobs": [0.0], "tokens": ["token_id:1"]},
        }
    ],
}
_EPISODE_SECONDS = 30.0


def _engine(model: str) -> Handler:
    """Answers as an inference server would: with the same text, whatever was asked."""
    served = {"id": "policy", "object": "model", "root": model}

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"object": "list", "data": [served]})
        await request.read()
        path = request.path.rpartition("/v1/")[2]
        if path == "completions":
            return web.json_response(_COMPLETION)
        protocol = PROTOCOLS.get(path, PROTOCOLS["chat/completions"])
        return web.json_response(protocol.reply().whole(_REPLY))

    return answer


@dataclass(frozen=True)
class PartFault:
    """The fault of a part."""

    text: str
    code: ExitCode = ExitCode.FAIL


def try_reward(name: str) -> PartFault | None:
    """Score an empty completion."""
    rows = [("", "4", NO_COLUMNS)]
    (value,) = asyncio.run(score_rows(name, rows, RewardLimits(), progress=lambda: None))
    return _fault(value.cause, value.detail) if isinstance(value, RewardFailure) else None


def try_agent(target: str, kwargs: Mapping[str, Any], model: str) -> PartFault | None:
    """Run one episode."""
    bound = socket.create_server((LOOPBACK, 0))
    with bound, in_thread(listening(application(_engine(model)), bound)) as port:
        return asyncio.run(_episode(target, f"http://{LOOPBACK}:{port}/v1", kwargs))


async def _episode(target: str, url: str, kwargs: Mapping[str, Any]) -> PartFault | None:
    endpoint = AgentEndpoint(url, "None", "policy")
    setup = AgentSetup(target, endpoint, seconds=_EPISODE_SECONDS, kwargs=kwargs)
    async with AgentPool(setup, workers=1) as pool:
        result = await pool.run_episode(json.dumps(_ROW))
    return _fault(result.cause, result.detail) if result.cause else None


def _fault(cause: str, detail: str) -> PartFault:
    own_code = cause == "exception"
    return PartFault(f"{cause}: {detail}", ExitCode.UNKNOWN if own_code else ExitCode.FAIL)


def try_sink(name: str) -> PartFault | None:
    """Look package and settings up."""
    require_sinks([name])
    return None


KINDS = ("reward", "agent", "sink")


def smoke_test(kind: str, name: str, kwargs: Mapping[str, Any], model: str) -> PartFault | None:
    """The part's fault; None when it works."""
    if kind == "agent":
        return try_agent(name, kwargs, model)
    return try_reward(name) if kind == "reward" else try_sink(name)


def main() -> int:
    """Try the part that was named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name")
    parser.add_argument("kwargs", nargs="?", type=json.loads, default={})
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    try:
        fault = smoke_test(args.kind, args.name, args.kwargs, args.model)
    except ShakedownError as error:
        fault = PartFault(" ".join(str(error).split()))
    if fault is None:
        return int(ExitCode.OK)
    print(fault.text, file=sys.stderr)
    return int(fault.code)


if __name__ == "__main__":
    sys.exit(main())
