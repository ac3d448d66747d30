"""What `debug attach` prints and writes of processes that stand."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shakedown.core.errors import UsageError
from shakedown.debug.attach import choose, debug_folders, launch_entries, ssh_lines, write_launch
from shakedown.debug.attach_job import DebuggedJob, of_processes, ray_lines
from shakedown.debug.paused_processes import (
    SILENT_SECONDS,
    PausedProcess,
    PauseFile,
    make_folder,
    read_stops,
)
from tests.command import shakedown

RANK_0 = PausedProcess(
    node="n1",
    host="n1.site",
    pid=11,
    role="trainer",
    rank=0,
    program="shakedown.training.stage.worker",
    file="/app/train.py",
    line=12,
    function="step",
    reason="breakpoint",
    detail="",
    port=4000,
    token="secret-0",
    attached=False,
    since=1.0,
)
RANK_1 = replace(RANK_0, node="n2", host="n2.site", pid=12, rank=1, token="secret-1")
AGENT = replace(RANK_0, pid=13, role="orchestrator", rank=None, port=4001)


def written(folder: Path, *stops: PausedProcess) -> Path:
    make_folder(folder)
    for stop in stops:
        PauseFile(folder, stop.node, stop.pid).write(stop)
    return folder


def test_stops_are_read_back_in_order_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    folder = written(tmp_path / "debug", RANK_1, RANK_0, AGENT)

    assert read_stops(folder) == [AGENT, RANK_0, RANK_1]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_process_that_was_killed_stands_no_more_once_its_file_is_old(tmp_path: Path) -> None:
    folder = written(tmp_path / "debug", RANK_0, RANK_1)
    old = time.time() - SILENT_SECONDS - 5
    os.utime(PauseFile(folder, "n1", 11).path, (old, old))

    assert read_stops(folder) == [RANK_1]


def test_ranks_names_pids_and_all_are_chosen_and_others_are_refused(tmp_path: Path) -> None:
    stops = [(tmp_path, RANK_0), (tmp_path, RANK_1), (tmp_path, AGENT)]

    assert [s.pid for _, s in choose(stops, ["1", "orchestrator"])] == [12, 13]
    assert [s.pid for _, s in choose(stops, ["11"])] == [11]
    assert choose(stops, ["all"]) == stops
    with pytest.raises(UsageError, match=r"'trainer-rank7'.*did you mean 'trainer-rank"):
        choose(stops, ["trainer-rank7"])


def test_ssh_goes_through_the_login_node_once_a_node_and_no_port_twice() -> None:
    lines = ssh_lines([RANK_0, AGENT, RANK_1], "login.site", "login")

    first, second = lines
    assert "-L 127.0.0.1:4000:127.0.0.1:4000 -L 127.0.0.1:4001:127.0.0.1:4001 -J " in first
    assert first.endswith("@n1")
    assert "@login.site " in first
    assert "-L 127.0.0.1:4002:127.0.0.1:4000 " in second
    assert second.endswith("@n2")


def test_a_process_of_the_login_node_itself_needs_no_second_jump() -> None:
    (line,) = ssh_lines([RANK_0], "login.site", "n1.site")

    assert "-J" not in line
    assert line.endswith("@login.site")


def test_launch_json_keeps_the_entries_of_others_and_replaces_ours(tmp_path: Path) -> None:
    path = tmp_path / ".vscode" / "launch.json"
    path.parent.mkdir()
    own = {"name": "mine", "type": "debugpy", "request": "launch"}
    path.write_text(json.dumps({"version": "0.2.0", "configurations": [own]}))

    write_launch(path, launch_entries([AGENT], {}))
    write_launch(path, launch_entries([RANK_0, RANK_1], {"/app": "/home/me/app"}))

    body = json.loads(path.read_text())
    mine, first, second = body["configurations"]
    assert mine == own
    assert first["connect"] == {"host": "127.0.0.1", "port": 4000}
    assert second["connect"]["port"] == 4001
    assert [first["shakedownToken"], second["shakedownToken"]] == ["secret-0", "secret-1"]
    assert first["pathMappings"] == [{"localRoot": "/home/me/app", "remoteRoot": "/app"}]
    (every,) = body["compounds"]
    assert every["configurations"] == [first["name"], second["name"]]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_launch_json_with_comments_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text("{// mine\n}")

    with pytest.raises(UsageError, match="without comments"):
        write_launch(path, launch_entries([RANK_0], {}))

    assert path.read_text() == "{// mine\n}"


def test_stops_of_a_run_of_a_stage_and_of_an_attempt_are_found(tmp_path: Path) -> None:
    attempt = tmp_path / "stages" / "sft" / "attempts" / "001"
    attempt.mkdir(parents=True)
    (attempt.parents[1] / "latest").symlink_to("attempts/001")
    written(attempt / "debug", RANK_0)

    found = [debug_folders(root) for root in (tmp_path, attempt.parents[1], attempt)]

    assert [[folder.resolve() for folder in one] for one in found] == 3 * [[attempt / "debug"]]


def test_a_run_that_was_not_started_to_be_debugged_is_told_how(tmp_path: Path) -> None:
    done = shakedown("debug", "attach", tmp_path)

    assert done.returncode == 2
    assert "shakedown train STAGE --config FILE --debug" in done.stderr


def test_of_a_job_only_its_own_processes_on_the_node_are_asked() -> None:
    own = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    environments = [
        {**own, "SHAKEDOWN_DEBUG_FOLDER": "/a", "RAY_DEBUG": "legacy"},
        {**own, "SHAKEDOWN_DEBUG_FOLDER": "/a"},
        {**own, "SLURM_JOB_ID": "8", "SHAKEDOWN_DEBUG_FOLDER": "/b"},
        {**own, "SLURMD_NODENAME": "n2", "SHAKEDOWN_DEBUG_FOLDER": "/c"},
    ]

    assert of_processes("7", "n1", environments) == {"folders": ["/a"], "ray_debug": ["legacy"]}


def test_ray_is_forwarded_from_the_first_node_and_its_old_debugger_is_named() -> None:
    job = DebuggedJob("7", ("n3", "n4"), (), frozenset({"legacy"}))

    forward, add, warned = ray_lines(job, 8265, 5000)

    assert forward == "ssh -N -L 127.0.0.1:5000:127.0.0.1:8265 n3"
    assert "127.0.0.1:5000" in add
    assert "RAY_DEBUG=legacy" in warned
    assert len(ray_lines(replace(job, ray_debug=frozenset({"1"})), 8265, 5000)) == 2
