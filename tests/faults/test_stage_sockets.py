"""Who can reach a stage that is a command: its listening sockets, for every way to launch it."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from shakedown.core.paths import StagePaths
from tests.faults.command_stage import Start, finish, wait_for_step
from tests.security.census import Census
from tests.trainer_pythons import needs_ray
from tests.trainer_stages import ACTORS, FRONTS
from tests.workflow.helpers import ROOT, read_json

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "tests" / "data" / "trainers" / "ddp.py"


def submitted(port: int) -> int:
    """The answer's code to a job that nobody with the token gave to the dashboard."""
    job = json.dumps({"entrypoint": "id"}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/jobs/", job)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as got:
            return int(got.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@needs_ray
def test_ray_listens_on_loopback_and_runs_no_job_without_the_attempts_token(
    start: Start, stage: StagePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a token of the user's own Ray asks for one everywhere.
    home = tmp_path / ".ray"
    home.mkdir(mode=0o700)
    (home / "auth_token").write_text("0123456789abcdef" * 2)
    monkeypatch.setenv("HOME", str(tmp_path))
    with Census() as census:
        for name, value in census.environment.items():
            monkeypatch.setenv(name, value)
        process = start(**ACTORS | {"command": f"{ACTORS['command']} --steps 12", "steps": 12})
        wait_for_step(stage, 2)
        answered = submitted(read_json(stage.latest / "job.json")["ray"]["dashboard"])
        finish(process)

    assert answered == 401
    assert read_json(stage.outcome)["state"] == "completed"
    assert any("gcs_server" in each.program for each in census.listeners)
    assert not census.beyond_loopback()
    assert (stage.latest / "secret").stat().st_mode & 0o077 == 0
    token = (stage.latest / "secret").read_text()
    assert not [command for command in census.commands if token in command]


@pytest.mark.exhaustive
@pytest.mark.parametrize("launch", list(FRONTS))
def test_beside_torch_s_own_store_nothing_listens_beyond_loopback(
    start: Start, stage: StagePaths, monkeypatch: pytest.MonkeyPatch, launch: str
) -> None:
    with Census() as census:
        for name, value in census.environment.items():
            monkeypatch.setenv(name, value)
        command = f"{FRONTS[launch]}{SCRIPT} --out {{stage}}/checkpoints --steps 4"
        process = start(
            algorithm="command",
            launch=launch,
            command=command,
            ranks_per_node=2,
            progress={"pattern": r"step (?P<step>\d+)"},
        )
        finish(process)

    assert read_json(stage.outcome)["state"] == "completed"
    assert census.listeners
    # torch's TCPStore takes no address to listen on: of torchrun's, or of rank 0.
    assert len(census.beyond_loopback()) <= 1
    assert all(SCRIPT.name in each.program for each in census.beyond_loopback())
