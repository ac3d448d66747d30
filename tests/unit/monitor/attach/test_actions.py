"""What an alarm does: real commands, and a real HTTP server on loopback."""

import hashlib
import hmac
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from shakedown.commands.watch import _command
from shakedown.core.errors import UntrustedError, UsageError
from shakedown.monitor.attach import actions
from shakedown.monitor.attach.actions import Actions, Alarm, Webhook
from tests.tls import https_server, needs_openssl

ALARM = Alarm(
    "job 7", "7", "hung", "rank_busy", "rank 1; `touch x` $(y)", [1, 2], ["n2"], "/e f", "2026"
)


@dataclass
class Received:
    """What the server was sent; `code` is what it answers, with a redirect to itself."""

    url: str = ""
    code: int = 204
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@pytest.fixture
def received() -> Iterator[Received]:
    got = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            got.headers.append(dict(self.headers))
            self.send_response(got.code)
            self.send_header("Location", got.url)
            self.end_headers()

        def log_request(self, *_: object) -> None:
            """Nothing on standard error."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        got.url = f"http://127.0.0.1:{server.server_port}/alarm"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield got
        server.shutdown()
        thread.join()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"key\n")
    path.chmod(0o600)
    return path


def test_a_webhook_is_sent_the_alarm_signed_with_the_secret(
    received: Received, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # this machine is reached without it
    said = Actions(webhook=Webhook(received.url, secret)).act(ALARM)

    assert said == ["webhook: answered 204"]
    body = json.loads(received.bodies[0])
    assert (body["schema"], body["cause"], body["ranks"]) == (
        "shakedown/alarm/1",
        "rank_busy",
        [1, 2],
    )
    expected = hmac.new(b"key", received.bodies[0], hashlib.sha256).hexdigest()
    assert received.headers[0]["X-Shakedown-Signature"] == f"sha256={expected}"


def test_a_webhook_without_a_secret_is_not_signed(received: Received) -> None:
    Actions(webhook=Webhook(received.url)).act(ALARM)
    assert "X-Shakedown-Signature" not in received.headers[0]


@pytest.mark.parametrize("code", [307, 302, 500])
def test_a_webhook_that_refuses_or_redirects_is_said_and_not_followed(
    received: Received, code: int
) -> None:
    received.code = code
    assert actions.post(Webhook(received.url), ALARM) == f"failed: answered {code}"
    assert len(received.bodies) == 1


def test_a_webhook_that_nobody_answers_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "failed: " in actions.post(Webhook(f"http://127.0.0.1:{port}/"), ALARM)


@needs_openssl
def test_a_webhook_of_a_ca_of_ones_own_is_reached_and_signed(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with https_server(tmp_path) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(server.ca))
        assert actions.post(Webhook(server.url, secret), ALARM) == "answered 204"
    ((headers, body),) = server.got
    expected = hmac.new(b"key", body, hashlib.sha256).hexdigest()
    assert headers["X-Shakedown-Signature"] == f"sha256={expected}"


@needs_openssl
@pytest.mark.parametrize(
    ("trusted", "host", "why"),
    [
        (False, "127.0.0.1", "unable to get local issuer certificate"),
        (True, "localhost", "Hostname mismatch, certificate is not valid for 'localhost'"),
    ],
)
def test_a_certificate_that_is_refused_is_said_and_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool, host: str, why: str
) -> None:
    with https_server(tmp_path) as server:
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(server.ca))
        said = actions.post(Webhook(server.url.replace("127.0.0.1", host)), ALARM)
    assert said.startswith(f"failed: the server's certificate is refused: {why} (")
    assert not server.got


def test_a_webhook_that_never_answers_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "WEBHOOK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        assert "no answer within 0.2 s" in actions.post(Webhook(url), ALARM)


def test_a_secret_that_became_readable_for_others_sends_nothing(
    received: Received, secret: Path
) -> None:
    secret.chmod(0o644)
    assert actions.post(Webhook(received.url, secret), ALARM).startswith("not sent: ")
    assert not received.bodies


@pytest.mark.parametrize(
    "url",
    ["http://example.org/x", "ftp://127.0.0.1/", "example.org", "https://", "http://[::1", ""],
)
def test_an_address_that_is_not_https_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected https"):
        actions.webhook_address(url)


def test_an_address_comes_from_a_file_that_nobody_else_reads(secret: Path) -> None:
    secret.write_text("https://hooks.example.org/T0/very-secret\n")
    assert actions.webhook_address(f"@{secret}") == "https://hooks.example.org/T0/very-secret"

    secret.write_text("http://hooks.example.org/T0/very-secret\n")
    with pytest.raises(UsageError, match="expected https") as raised:
        actions.webhook_address(f"@{secret}")
    assert "very-secret" not in str(raised.value)

    with pytest.raises(UsageError, match=r"--webhook .*No such file"):
        actions.webhook_address(f"@{secret}-none")
    secret.chmod(0o644)
    with pytest.raises(UntrustedError):
        actions.webhook_address(f"@{secret}")


def test_a_secret_is_looked_at_before_it_is_needed(tmp_path: Path, secret: Path) -> None:
    actions.check_secret(secret)
    with pytest.raises(UsageError, match="No such file"):
        actions.check_secret(tmp_path / "none")
    secret.write_bytes(b" \n")
    with pytest.raises(UsageError, match="empty"):
        actions.check_secret(secret)
    secret.chmod(0o640)
    with pytest.raises(UntrustedError):
        actions.check_secret(secret)


def test_a_command_gets_the_values_as_words_that_are_harmless_and_as_variables(
    tmp_path: Path,
) -> None:
    code = (
        "import json, os, sys; print(json.dumps([*sys.argv[1:], os.environ['SHAKEDOWN_SENTENCE']]))"
    )
    (tmp_path / "show.py").write_text(code)
    text = f"{sys.executable} {tmp_path}/show.py {{sentence}} {{job}}:{{ranks}} {{evidence}}"
    (said,) = Actions(command=_command(text)).act(ALARM)
    got = said.partition("ended with 0: ")[2]
    assert json.loads(got) == ["rank 1_ _touch x_ __y_", "7:1,2", "/e f", ALARM.sentence]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bash -c {sentence}", "bash ended with 127"),
        (
            "bash -c 'eval \"echo $0\"' {sentence}",
            "ended with 0: ALARM __touch PWNED_",
        ),
        ("env --split-string={sentence}", "env ended with 127"),
        (
            "bash -c 'echo \"$SHAKEDOWN_SENTENCE\" | head -1'",
            "ALARM $(touch PWNED) `touch",
        ),
    ],
)
def test_no_shell_runs_the_text_of_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    alarm = replace(ALARM, sentence="ALARM $(touch PWNED) `touch PWNED`\ntouch PWNED;touch PWNED")
    (line,) = Actions(command=_command(command)).act(alarm)
    assert said in line
    assert not (tmp_path / "PWNED").exists()


def test_a_command_with_a_value_inside_a_text_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--command .*\{sentence\} inside a text"):
        _command("bash -euo pipefail -c 'echo ALARM {sentence}'")


def test_a_command_that_fails_or_is_not_there_is_said(tmp_path: Path) -> None:
    assert actions.run_command(["sh", "-c", "echo why; exit 3"]) == "sh ended with 3: why"
    assert "could not be run" in actions.run_command([str(tmp_path / "none")])


def test_a_command_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "COMMAND_SECONDS", 0.2)
    assert "was ended after" in actions.run_command(["sleep", "600"])


def test_a_job_that_cannot_be_cancelled_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "scancel"
    program.write_text('#!/bin/sh\necho "scancel: error: $1 is not yours" >&2; exit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert Actions(scancel=True).act(ALARM) == [
        "scancel: failed: scancel 7: scancel: error: 7 is not yours"
    ]
