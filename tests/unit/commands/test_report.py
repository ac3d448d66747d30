"""`shakedown report`, `status` and `verdict` from the command line: output and exit codes."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from shakedown import cli
from shakedown.core.files import write_json, write_text
from shakedown.core.paths import RunPaths
from shakedown.core.verdict import Finding, Verdict
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import ENDPOINT_SCHEMA, ServerOrder, ServerState
from shakedown.monitor.heartbeat import Heartbeat


def write_verdict(path: Path, status: Any, **more: Any) -> Path:
    Verdict(stage="agents", status=status, summary="said so", **more).write(path)
    return path


def write_running_stage(paths: RunPaths) -> None:
    write_text(paths.config, "run: demo\nstages: {grpo: {algorithm: grpo, steps: 150}}\n")
    attempt = paths.stage("grpo").new_attempt()
    write_text(paths.stage("grpo").metrics, json.dumps({"step": 57, "reward_mean": 0.427}) + "\n")
    for rank in (0, 1):
        beat = Heartbeat(attempt.heartbeats, rank)
        beat.beat(phase="train", step=58)
        beat.close()


@contextlib.contextmanager
def http_server(status: int) -> Iterator[str]:
    """A real server on a free port that answers every GET with `status`."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("command", ["report", "status"])
def test_a_run_that_does_not_exist_is_a_usage_error(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err


def test_report_writes_the_page_and_prints_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_verdict(tmp_path / "agents" / "verdict.json", "FAIL")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report" / "index.html").is_file()
    printed = capsys.readouterr().out
    assert "FAIL: agents failed" in printed
    assert f"report: {tmp_path / 'report' / 'index.html'}" in printed


def test_report_writes_where_it_is_told(tmp_path: Path) -> None:
    write_verdict(tmp_path / "agents" / "verdict.json", "PASS")
    out = tmp_path / "a" / "b.html"
    assert cli.main(["report", str(tmp_path), "--out", str(out)]) == 0
    assert out.is_file()


def test_report_names_what_it_could_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "agents" / "verdict.json", "{")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "unreadable: agents/verdict.json: verdict.json is not JSON" in capsys.readouterr().out


def test_report_on_a_place_that_cannot_be_written_is_blocked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_verdict(tmp_path / "agents" / "verdict.json", "PASS")
    write_text(tmp_path / "file", "x")
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "file" / "x.html")]) == 3
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "flags", "code"),
    [
        ("PASS", [], 0),
        ("WARN", [], 0),
        ("WARN", ["--strict"], 1),
        ("FAIL", [], 1),
        ("UNKNOWN", [], 3),
    ],
)
def test_verdict_exits_as_its_stage_did(
    status: str,
    flags: list[str],
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_verdict(tmp_path / "verdict.json", status, next="do this")
    assert cli.main(["verdict", str(file), *flags]) == code
    printed = capsys.readouterr().out
    assert f"agents: {status}: said so" in printed
    assert "next: do this" in printed


@pytest.mark.parametrize("content", [None, "", "[1]", "[" * 200_000, '{"schema": "x"}'])
def test_verdict_on_a_bad_file_is_a_usage_error_without_a_traceback(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verdict.json"
    if content is not None:
        write_text(file, content)
    assert cli.main(["verdict", str(file)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_verdict_prints_no_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_verdict(tmp_path / "verdict.json", "FAIL", next="x")
    said = "\\u001b[2Jgone \\ud800"  # an escape sequence, and half a surrogate pair
    file.write_text(file.read_text().replace("said so", said))
    assert cli.main(["verdict", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "?[2Jgone ?" in printed
    assert "\x1b" not in printed


def test_verdict_of_wrong_types_is_bad_input_and_the_fields_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [{"check": "c", "status": "\u001bbogus"}]
    file = write_verdict(tmp_path / "verdict.json", "FAIL", findings=[])
    file.write_text(json.dumps({**json.loads(file.read_text()), "findings": findings}))
    assert cli.main(["verdict", str(file)]) == 2
    told = capsys.readouterr().err
    assert "findings.0.status: Input should be" in told
    assert "\x1b" not in told


def test_verdict_lists_every_finding_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding(f"check{i}", "fail") for i in range(60)]
    file = write_verdict(tmp_path / "verdict.json", "FAIL", findings=findings)
    cli.main(["verdict", str(file)])
    assert "check59" not in capsys.readouterr().out
    cli.main(["verdict", str(file), "--all"])
    assert "check59" in capsys.readouterr().out


def test_status_shows_progress_and_heartbeats_of_a_stage_under_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_running_stage(RunPaths(tmp_path))
    assert cli.main(["status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Running: grpo, step 57 of 150" in printed
    assert "[#########...............] 38%" in printed
    assert "reward_mean 0.427" in printed
    assert "trainer-rank1  train, step 58, beat" in printed
    assert printed.isascii()


@pytest.mark.parametrize(
    ("status", "said"), [(200, "is up and healthy"), (503, "is not healthy: /health: HTTP 503")]
)
def test_status_says_how_the_server_is(
    status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with http_server(status) as url:
        order = ServerOrder("policy", "vllm", LaunchSpec("m"))
        body = asdict(ServerState("running", "n", 1)) | {
            "name": "policy",
            "engine": "vllm",
            "model": "m",
        }
        body |= {"base_url": url, "served_name": "policy", "started": "", "log": ""}
        body |= {"lease": {}, "launcher": {}, "capabilities": {}, "order": asdict(order)}
        path = RunPaths(tmp_path).server("policy").endpoint
        write_json(path, {"schema": ENDPOINT_SCHEMA, **body})
        assert cli.main(["status", str(tmp_path)]) == 0
    assert f"{url} {said}" in capsys.readouterr().out


def test_status_does_not_ask_a_server_that_was_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    write_json(
        paths.server("policy").endpoint, {"base_url": "http://127.0.0.1:1", "engine": "vllm"}
    )
    state = {"phase": "ended", "reason": "stopped on request", "returncode": None}
    write_json(paths.server("policy").state, state)
    assert cli.main(["status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "ok      serve" in printed
    assert "stopped on request" in printed
    assert "not running" in printed


@pytest.mark.parametrize("engine", ["vllm", "abacus"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "gopher://x", "http://[bad", "", "\x1b[2J"])
def test_status_survives_an_endpoint_that_leads_nowhere(
    url: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"base_url": url, "engine": engine}
    write_json(RunPaths(tmp_path).server("policy").endpoint, body)
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "is not healthy" in capsys.readouterr().out


def test_status_prints_no_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_verdict(tmp_path / "agents" / "verdict.json", "FAIL", next="\x1b]0;owned\x07")
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_status_refuses_an_interval_that_is_none(
    seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", str(tmp_path), f"--watch={seconds}"]) == 2
    assert "expected a number of seconds above 0" in capsys.readouterr().err


def test_status_watches_until_it_is_interrupted(tmp_path: Path) -> None:
    write_running_stage(RunPaths(tmp_path))
    command = [sys.executable, "-m", "shakedown.cli", "status", str(tmp_path), "--watch", "0.05"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    shown = 0
    for line in process.stdout:
        shown += line.startswith("demo: RUNNING")
        if shown == 3:
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_the_commands_are_imported_without_the_heavy_packages() -> None:
    code = (
        "import sys; import shakedown.commands.report, shakedown.commands.status, "
        "shakedown.commands.verdict; "
        "print([m for m in ('torch', 'transformers', 'vllm', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_status_of_a_stage_under_way_starts_without_pandas(tmp_path: Path) -> None:
    write_running_stage(RunPaths(tmp_path))
    code = (
        "import sys; from shakedown.cli import main; "
        f"main(['status', {str(tmp_path)!r}]); print('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "reward_mean 0.427" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_status_shows_the_last_metrics_row_and_says_what_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path)
    write_running_stage(paths)
    rows = [{"step": 56, "loss": 2.0, "k3": 0.5}, {"step": 57, "loss": float("nan"), "k3": "7"}]
    write_text(paths.stage("grpo").metrics, "".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "          loss not finite\n" in printed
