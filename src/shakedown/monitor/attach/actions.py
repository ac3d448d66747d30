"""Actions of an alarm: a command, a webhook, scancel. A failed one never ends the watch."""

import hashlib
import hmac
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from shakedown.core.errors import LaunchError, ShakedownError, UsageError
from shakedown.core.private import read_secret
from shakedown.core.visible import masked
from shakedown.monitor.collect.bounded import run_bounded
from shakedown.slurm import jobs

SCHEMA = "shakedown/alarm/1"
SIGNATURE = "X-Shakedown-Signature"
COMMAND_SECONDS = 60.0
WEBHOOK_SECONDS = 10.0
_LOOK_UP_SECONDS = 5.0
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Alarm:
    """One stall, as commands and webhooks receive it. `at`: UTC, ISO 8601."""

    subject: str
    job: str
    state: str
    cause: str
    sentence: str
    ranks: Sequence[int]
    nodes: Sequence[str]
    evidence: str
    at: str

    def values(self) -> dict[str, str]:
        """The values of a command's placeholders."""
        lists = {"ranks": ",".join(map(str, self.ranks)), "nodes": ",".join(self.nodes)}
        return {**{k: v for k, v in asdict(self).items() if isinstance(v, str)}, **lists}

    @staticmethod
    def placeholders() -> list[str]:
        return list(Alarm.__dataclass_fields__)


AlarmCommand = tuple[Sequence[str], Mapping[str, str]]  # the words, and variables beside its own


@dataclass(frozen=True)
class Webhook:
    """Where an alarm is posted to; `secret`: a file whose content signs the body."""

    url: str
    secret: Path | None = None


@dataclass(frozen=True)
class Actions:
    """The actions of an alarm. `command`: makes words and variables of the alarm's values."""

    scancel: bool = False
    command: Callable[[Mapping[str, str]], AlarmCommand] | None = None
    webhook: Webhook | None = field(default=None)

    def act(self, alarm: Alarm) -> list[str]:
        """Take all actions, scancel last; one line per action with its result."""
        said = []
        if self.command is not None:
            said.append(f"command: {run_command(*self.command(alarm.values()))}")
        if self.webhook is not None:
            said.append(f"webhook: {post(self.webhook, alarm)}")
        if self.scancel:
            said.append(f"scancel: {_scancel(alarm.job)}")
        return said


def webhook_address(given: str) -> str:
    """An https address, or http of this machine itself; of `@FILE` the one in the file.

    Raises:
        UsageError: any other: the evidence's sentence and the signature would go in the clear.
        UntrustedError: others can read the file, whose address often lets in whoever knows it.
    """
    url, said = given, repr(given[:80])
    if given.startswith("@"):
        url, said = _secret_of("--webhook", Path(given[1:])), f"{given}: what is in it"
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        parts, host = urlsplit(""), ""
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and _is_here(host))):
        raise UsageError(
            f"--webhook {said}: expected https://HOST/..., or http://127.0.0.1:PORT/...",
            hint="--webhook https://hooks.example.org/alarm --webhook-secret FILE",
        )
    return url


def check_secret(path: Path) -> None:
    """Whether the secret can be used, before it is needed.

    Raises:
        UsageError: it cannot be read, or is empty.
        UntrustedError: others can read it.
    """
    _secret_of("--webhook-secret", path)


def _secret_of(option: str, path: Path) -> str:
    try:
        content = read_secret(path).strip()
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror or error}") from error
    if not content:
        raise UsageError(f"{option} {path}: the file is empty")
    return content.decode("utf-8", "replace")


def signature(secret: bytes, body: bytes) -> str:
    """`sha256=` and the HMAC-SHA256 (RFC 2104) of the body in hexadecimal, as GitHub signs its."""
    return f"sha256={hmac.new(secret, body, hashlib.sha256).hexdigest()}"


def post(webhook: Webhook, alarm: Alarm) -> str:
    """POST the alarm as JSON; returns the result. Bounded in time, no redirect is followed."""
    body = json.dumps({"schema": SCHEMA, **asdict(alarm)}).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "shakedown"}
    try:
        if webhook.secret is not None:
            headers[SIGNATURE] = signature(read_secret(webhook.secret).strip(), body)
    except (OSError, ShakedownError) as error:
        return f"not sent: {_first_line(error)}"
    # In a thread: a look-up of the host's name cannot be ended.
    send = partial(_send, webhook.url, body, headers)
    (given,) = run_bounded([send], 1, WEBHOOK_SECONDS + _LOOK_UP_SECONDS)
    if isinstance(given, str):
        return given
    return f"failed: {_first_line(given) if given else 'no answer in time'}"


def _send(url: str, body: bytes, headers: Mapping[str, str]) -> str:
    from shakedown.core.http import NoAnswerError, fetch  # few watches have a webhook

    here = _is_here(urlsplit(url).hostname or "")
    try:
        status = fetch(
            "POST",
            url,
            seconds=WEBHOOK_SECONDS,
            largest=0,
            by_proxy=not here,
            data=body,
            headers=headers,
        ).status
    except NoAnswerError as error:
        return f"failed: {masked(error.why)[:300]}"
    return f"{'' if status < 300 else 'failed: '}answered {status}"


def _is_here(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def run_command(words: Sequence[str], more: Mapping[str, str] = _NOTHING) -> str:
    """Run it without a shell, with `more` variables; returns the result, with its last line."""
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} was ended after {COMMAND_SECONDS:.0f} s"
    except (OSError, ValueError) as error:
        return f"{words[0]} could not be run: {_first_line(error)}"
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    last = f": {masked(lines[-1])[:200]}" if lines else ""
    return f"{words[0]} ended with {done.returncode}{last}"


def _scancel(job_id: str) -> str:
    try:
        jobs.cancel(job_id)
    except LaunchError as error:
        return f"failed: {error.args[0]}"
    return f"job {job_id} is cancelled"


def _first_line(error: Exception) -> str:
    return masked(str(error).partition("\n")[0])[:200] or type(error).__name__
