"""Ready means: a real generation was answered, not only a health check."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shakedown.core.errors import ServerError
from shakedown.core.http import NoAnswerError
from shakedown.inference.engines import InferenceEngine, Request
from shakedown.inference.explain import likely_cause, log_end
from shakedown.inference.upstream import ask_once

_HEALTH_SECONDS = 5.0
_GENERATION_SECONDS = 60.0
_POLL_SECONDS = 0.25
_SAY_SECONDS = 5.0
# Statuses that waiting does not change.
# Not 5xx and 429: servers send those while they load or are busy.
_FINAL = (400, 401, 403, 404, 422)


@dataclass(frozen=True)
class ReadyOptions:
    """How to wait for a server, and the `api_key` that it asks for.

    `dead` returns why the server can no longer come up, or None; `say` gets a line for
    people every few seconds; `tick` is called at every look.
    """

    timeout: float
    api_key: str = field(default="", repr=False)
    dead: Callable[[], str | None] = lambda: None
    say: Callable[[str], None] = lambda _: None
    tick: Callable[[], None] = lambda: None
    log: Path | None = None


def wait_ready(engine: InferenceEngine, base_url: str, model: str, wait: ReadyOptions) -> float:
    """Wait until the server answers a generation; returns the seconds it took.

    Raises:
        ServerError: it died, refused the generation, answers whoever asks, or did not answer in
            time; with the end of its log and the likely cause.
    """
    began = said = time.monotonic()
    answered = "nothing answered"
    while (now := time.monotonic()) - began < wait.timeout:
        wait.tick()
        reason = wait.dead()
        if reason is not None:
            raise failure(f"the {engine.name} server at {base_url} {reason}", wait.log)
        fault = _look(engine, base_url, model, wait.api_key)
        if fault is None:
            _check_guarded(engine, base_url)
            return time.monotonic() - began
        answered = fault
        if now - said >= _SAY_SECONDS:
            said = now
            wait.say(f"{engine.name} starting, {now - began:.0f} s: {last_line(wait.log)}")
        time.sleep(_POLL_SECONDS)
    raise failure(
        f"the {engine.name} server at {base_url} did not answer a generation within "
        f"{wait.timeout:.0f} s; last: {answered}",
        wait.log,
    )


def health_fault(
    engine: InferenceEngine, base_url: str, api_key: str, *, timeout: float = _HEALTH_SECONDS
) -> str | None:
    """Why the server's health check is not good; None when it is."""
    return _fault(base_url, api_key, Request(engine.health_path, method="GET"), timeout)[0]


def generation_fault(
    engine: InferenceEngine, base_url: str, model: str, api_key: str
) -> str | None:
    """Why the server does not answer a generation; None when it does."""
    return _fault(base_url, api_key, engine.probe(model), _GENERATION_SECONDS)[0]


def failure(message: str, log: Path | None, returncode: int | None = None) -> ServerError:
    """The error for a server that failed: the end of its log and the likely cause."""
    text = read_end(log)
    cause = likely_cause(text, returncode)
    if text:
        shown = "\n".join(f"  | {line}" for line in log_end(text).splitlines())
        message = f"{message}\n  end of {log}:\n{shown}"
    if cause is None:
        return ServerError(message, hint=f"read {log}" if log else "read the server's log")
    return ServerError(f"{message}\n  likely cause: {cause.text}", hint=cause.remedy)


def read_end(log: Path | None, size: int = 65536) -> str:
    """The last `size` bytes of a log as text; empty when there is none."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - size))
        return stream.read().decode("utf-8", "replace")


def last_line(log: Path | None) -> str:
    """The last line of a log that says something."""
    return log_end(read_end(log, 4096), 1)[:160] or "no output yet"


def _check_guarded(engine: InferenceEngine, base_url: str) -> None:
    """Check that nobody is answered without the secret.

    Raises:
        ServerError: somebody is, as where an engine serves by more processes than its own.
    """
    if health_fault(engine, base_url, "") is None:
        raise ServerError(
            f"the {engine.name} server at {base_url} answers without its secret",
            hint="leave out of serve.extra_args what starts more processes that serve HTTP",
        )


def _look(engine: InferenceEngine, base_url: str, model: str, api_key: str) -> str | None:
    """The reason why the server is not ready, None when a generation was answered.

    Raises:
        ServerError: it refuses the generation.
    """
    # The health check comes first as it fails at once: a generation sent to a server that is still
    # loading could wait for up to a minute, in which its death would not be seen.
    fault = health_fault(engine, base_url, api_key)
    if fault is not None:
        return fault
    fault, status = _fault(base_url, api_key, engine.probe(model), _GENERATION_SECONDS)
    if status in _FINAL:
        raise ServerError(
            f"the {engine.name} server at {base_url} refuses a generation: {fault}",
            hint=f"is {model!r} the model that it serves?",
        )
    return fault


def _fault(base_url: str, api_key: str, request: Request, timeout: float) -> tuple[str | None, int]:
    """(fault, HTTP status or 0); (None, status) when the answer is good."""
    body = dict(request.body) if request.method == "POST" else None
    try:
        url = f"{base_url}{request.path}"
        asked = ask_once(request.method, url, api_key, seconds=timeout, json=body)
        answer = asyncio.run(asked)
    except NoAnswerError as error:
        return f"{request.path}: {error.why}", 0
    if 200 <= answer.status < 300:
        return None, answer.status
    return f"{request.path}: HTTP {answer.status} {answer.text[:200]}", answer.status
