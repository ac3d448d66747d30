"""A small inference server for the scoreboard: SGLang's protocol, transformers on the CPU.

Started in place of SGLang (`python -m sglang.launch_server`, see `scoreboard_run`); its answers
and log-probabilities are the model's own. `--hang-at-update N`: its Nth weight update never ends.
"""

import argparse
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from shakedown.inference.auth import bearer, read_secret

# Of one generated token: the trainer is not faster than its server.
TOKEN_SECONDS = 0.01


class Engine(ThreadingHTTPServer):
    """One model, one request at a time."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, host: str, port: int, folder: str, hang_at_update: int, secret: str) -> None:
        super().__init__((host, port), Handler)
        self.header = bearer(secret)["Authorization"]
        self._lock = threading.Lock()
        self._hang_at_update, self._updates = hang_at_update, 0
        self._model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def load(self, folder: str) -> None:
        """Answer with the weights of `folder` from now on."""
        self._updates += 1
        while self._updates == self._hang_at_update:
            time.sleep(3600)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with self._lock:
            self._model = model

    def sample(
        self, prompt: list[int], *, count: int, samples: int, temperature: float
    ) -> list[list[tuple[float, int]]]:
        """(log-probability, token) of each new token, for each sample."""
        tokens = torch.tensor([prompt] * samples)
        written: list[list[tuple[float, int]]] = [[] for _ in range(samples)]
        with self._lock, torch.no_grad():
            for _ in range(count):
                time.sleep(TOKEN_SECONDS)
                scores = self._model(tokens).logits[:, -1].log_softmax(-1)
                chances = (scores / max(temperature, 1e-6)).softmax(-1)
                drawn = torch.multinomial(chances, 1)
                for row, token in enumerate(drawn[:, 0].tolist()):
                    written[row].append((float(scores[row, token]), token))
                tokens = torch.cat([tokens, drawn], 1)
        return written

    def score(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of tokens[1:]."""
        with self._lock, torch.no_grad():
            scores = self._model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        found: list[float] = scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        return found


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Engine

    def parse_request(self) -> bool:
        """Only uvicorn's applications are guarded (`shakedown.inference.auth`)."""
        known = super().parse_request()
        if known and self.headers.get("Authorization") != self.server.header:
            self.send_error(401)
            return False
        return known

    def do_GET(self) -> None:
        self._answer({"data": [{"max_model_len": 256}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        path = self.path.partition("?")[0]
        if path == "/generate":
            self._answer(self._generate(body))
        elif path == "/update_weights_from_disk":
            self.server.load(body["model_path"])
            self._answer({"success": True, "message": ""})
        else:
            self._answer({"success": True})

    def _generate(self, body: dict[str, Any]) -> Any:
        sampling = body["sampling_params"]
        prompt = body.get("input_ids", [1])
        rows = self.server.sample(
            prompt,
            count=sampling["max_new_tokens"],
            samples=sampling.get("n", 1),
            temperature=sampling.get("temperature", 1.0),
        )
        replies = [_reply(row) for row in rows]
        if body.get("logprob_start_len") == 0:
            known = [
                [v, t, None] for v, t in zip(self.server.score(prompt), prompt[1:], strict=True)
            ]
            replies[0]["meta_info"]["input_token_logprobs"] = [[None, prompt[0], None], *known]
        return replies if len(replies) > 1 else replies[0]

    def _answer(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


def _reply(row: list[tuple[float, int]]) -> dict[str, Any]:
    places = [[value, token, None] for value, token in row]
    finish = {"type": "length", "length": len(row)}
    meta = {"output_token_logprobs": places, "finish_reason": finish, "cached_tokens": 0}
    return {"text": "x", "meta_info": meta}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--hang-at-update", type=int, default=0, metavar="N")
    parser.add_argument("--random-seed", type=int, default=0)
    arguments, _others = parser.parse_known_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.random_seed)
    # This process was started as `python -m shakedown.inference.auth SECRET_FILE MODULE ...`.
    place = sys.orig_argv.index("shakedown.inference.auth")
    secret = read_secret(Path(sys.orig_argv[place + 1]))
    Engine(
        arguments.host, arguments.port, arguments.model_path, arguments.hang_at_update, secret
    ).serve_forever()


if __name__ == "__main__":
    main()
