"""Try one part of a run on this machine: `python -m shakedown.training.try_part KIND NAME`.

Exit code 0 when it works; else the reason is the last line of standard error: 1 when it cannot be
loaded or breaks its contract, 3 when its own code raised, maybe at the made-up question. KIND is

- `reward`: called once, with an empty completion, in a process of its own;
- `agent`: run once, against a server that answers every chat completion alike;
- `sink`: its package and its settings are looked up, nothing is sent.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from shakedown.agents.agent_pool import AgentPool, AgentSetup
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.reward_pool import RewardFailure, RewardLimits, score_rows
from shakedown.core.errors import ExitCode, ShakedownError
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
_EPISODE_SECONDS = 30.0


class _Handler(BaseHTTPRequestHandler):
    """Answers as an inference server would."""

    def do_POST(self) -> None:
        """A chat completion, whatever was asked."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(_REPLY)

    def do_GET(self) -> None:
        """The list of models."""
        self._answer({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    def _answer(self, body: dict[str, object]) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a part."""

    text: str
    code: ExitCode = ExitCode.FAIL


def try_reward(name: str) -> Fault | None:
    """Score an empty completion."""
    (value,) = asyncio.run(score_rows(name, [("", "4")], RewardLimits(), progress=lambda: None))
    return _fault(value.cause, value.detail) if isinstance(value, RewardFailure) else None


def try_agent(target: str) -> Fault | None:
    """Run one episode."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        try:
            return asyncio.run(_episode(target, url))
        finally:
            server.shutdown()


async def _episode(target: str, url: str) -> Fault | None:
    setup = AgentSetup(target, AgentEndpoint(url, "None", "policy"), seconds=_EPISODE_SECONDS)
    async with AgentPool(setup, workers=1) as pool:
        result = await pool.run_episode(json.dumps(_ROW))
    return _fault(result.cause, result.detail) if result.cause else None


def _fault(cause: str, detail: str) -> Fault:
    own_code = cause == "exception"
    return Fault(f"{cause}: {detail}", ExitCode.BLOCKED if own_code else ExitCode.FAIL)


def try_sink(name: str) -> Fault | None:
    """Look package and settings up."""
    require_sinks([name])
    return None


KINDS: dict[str, Callable[[str], Fault | None]] = {
    "reward": try_reward,
    "agent": try_agent,
    "sink": try_sink,
}


def main() -> int:
    """Try the part that was named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name")
    args = parser.parse_args()
    try:
        fault = KINDS[args.kind](args.name)
    except ShakedownError as error:
        fault = Fault(" ".join(str(error).split()))
    if fault is None:
        return int(ExitCode.OK)
    print(fault.text, file=sys.stderr)
    return int(fault.code)


if __name__ == "__main__":
    sys.exit(main())
