"""A real local server that writes tokens one after the other, in vLLM's and SGLang's protocols.

`python scripted_engine.py --port N [--seconds S]`. Its weights are a number: version v writes the
token 10 + v with log-probability -0.1 (v + 1), and loads version 7 from a folder `v000007`. A
prompt whose first token is in FAULTS gets the answer that stands there.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shakedown.inference.auth import read_secret

Change = Callable[[list["Sample"]], Any]


@dataclass
class Sample:
    """One answer."""

    tokens: list[int]
    logprobs: list[float]
    finish: str


def _shorten(sample: Sample) -> None:
    sample.logprobs.pop()


def _each(change: Callable[[Sample], Any]) -> Change:
    return lambda samples: [change(sample) for sample in samples]


def _lengthen(sample: Sample) -> None:
    sample.tokens.append(11)
    sample.logprobs.append(-0.5)


# By first token of the prompt: what is done to the answer.
FAULTS: dict[int, tuple[str, Change]] = {
    60: ("fewer logprobs than tokens", _each(_shorten)),
    61: ("foreign token", lambda samples: samples[-1].tokens.__setitem__(0, 1_000_000)),
    62: ("fewer choices than asked for", lambda samples: samples.pop()),
    63: ("empty", lambda samples: samples.__setitem__(0, Sample([], [], "stop"))),
    64: ("no number", lambda samples: samples[0].logprobs.__setitem__(0, float("nan"))),
    65: ("above 0", lambda samples: samples[0].logprobs.__setitem__(0, 0.5)),
    66: ("too long", _each(_lengthen)),
    67: ("aborted by somebody", lambda samples: setattr(samples[0], "finish", "abort")),
    68: ("negative token", lambda samples: samples[0].tokens.__setitem__(0, -1)),
    69: ("infinite", lambda samples: samples[0].logprobs.__setitem__(0, float("-inf"))),
}


def logprob(version: int) -> float:
    """What every token of a version costs."""
    return -0.1 * (version + 1)


class ScriptedEngine(ThreadingHTTPServer):
    """`seconds`: of one token but a probe's; `prompts`: of every generation but a probe's.

    `bad_every`: every so many generations are NaN. `secret`: what requests must carry.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int = 0, *, seconds: float = 0.0, bad_every: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.seconds, self.bad_every, self.version = seconds, bad_every, 0
        self.secret = ""
        self.prompts: list[list[int]] = []
        self.running = 0
        self._changed = threading.Condition()
        self._aborts = 0

    def abort(self) -> None:
        """End what is being written."""
        with self._changed:
            self._aborts += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.running, timeout=10.0)

    def write(self, prompt: list[int], count: int, samples: int) -> list[Sample]:
        """The answers, as far as they came."""
        with self._changed:
            if count > 1:
                self.prompts.append(prompt)
            number, aborts = len(self.prompts), self._aborts
            self.running += 1
            written = self._written(count, aborts)
            self.running -= 1
            self._changed.notify_all()
        finish = "length" if len(written) == count else "abort"
        found = [
            Sample([10 + v for v in written], [logprob(v) for v in written], finish)
            for _ in range(samples)
        ]
        bad = self.bad_every and count > 1 and number % self.bad_every == 0
        fault = FAULTS.get(64 if bad else prompt[0])
        if fault and count > 1:
            fault[1](found)
        return found

    def _written(self, count: int, aborts: int) -> list[int]:
        written: list[int] = []
        while len(written) < count:
            end = time.monotonic() + (self.seconds if count > 1 else 0.0)
            while time.monotonic() < end and self._aborts == aborts:
                self._changed.wait(end - time.monotonic())
            if self._aborts != aborts:
                break
            written.append(self.version)
        return written


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: ScriptedEngine

    def parse_request(self) -> bool:
        secret = self.server.secret
        known = super().parse_request()
        if known and secret and self.headers.get("Authorization") != f"Bearer {secret}":
            self.send_error(401)
            return False
        return known

    def do_GET(self) -> None:
        self._answer({"data": [{"max_model_len": 256}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        path = self.path.partition("?")[0]
        routes: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/v1/completions": self._completions,
            "/generate": self._generate,
            "/pause": self._abort,
            "/abort_request": self._abort,
            "/resume": lambda _: {"status": "resumed"},
            "/collective_rpc": lambda body: self._load(body["kwargs"]["weights_path"]),
            "/update_weights_from_disk": lambda body: self._load(body["model_path"]),
            "/reset_prefix_cache": lambda _: {"success": True},
        }
        self._answer(routes[path](body))

    def _abort(self, _body: dict[str, Any]) -> Any:
        self.server.abort()
        return {"status": "paused"}

    def _load(self, folder: str) -> Any:
        assert not self.server.running, "weights are changed under an answer"
        self.server.version = int(Path(folder).name.removeprefix("v"))
        return {"results": [{"repacked": 0}], "success": True}

    def _completions(self, body: dict[str, Any]) -> Any:
        if isinstance(body["prompt"], str):
            return {"choices": [{"text": "1"}]}
        found = self.server.write(body["prompt"], body["max_tokens"], body.get("n", 1))
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "text": "x",
                "token_ids": each.tokens,
                "logprobs": {"token_logprobs": each.logprobs},
                "finish_reason": each.finish,
            }
            for index, each in enumerate(found)
        ]
        if "prompt_logprobs" in body:
            places = [{str(t): {"logprob": logprob(self.server.version)}} for t in body["prompt"]]
            choices[0]["prompt_logprobs"] = [None, *places[1:]]
        return {"choices": choices, "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}

    def _generate(self, body: dict[str, Any]) -> Any:
        sampling, prompt = body["sampling_params"], body.get("input_ids", [1])
        found = self.server.write(prompt, sampling["max_new_tokens"], sampling.get("n", 1))
        replies: list[dict[str, Any]] = [{"text": "x", "meta_info": _meta(each)} for each in found]
        if body.get("logprob_start_len") == 0:
            known = [[logprob(self.server.version), token, None] for token in prompt]
            replies[0]["meta_info"]["input_token_logprobs"] = known
        return replies if len(replies) > 1 else replies[0]

    def _answer(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


def _meta(sample: Sample) -> dict[str, Any]:
    pairs = zip(sample.logprobs, sample.tokens, strict=False)
    return {
        "output_token_logprobs": [[value, token, None] for value, token in pairs],
        "finish_reason": {"type": sample.finish},
        "cached_tokens": 0,
    }


def _option(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


if __name__ == "__main__":
    engine = ScriptedEngine(int(_option("--port", "0")), seconds=float(_option("--seconds", "0")))
    if "shakedown.inference.auth" in sys.orig_argv:
        place = sys.orig_argv.index("shakedown.inference.auth")
        engine.secret = read_secret(Path(sys.orig_argv[place + 1]))
    print(engine.server_address[1], flush=True)
    engine.serve_forever()
