"""Files that steer a run, planted or changed by another user of the machine: nobody obeys them."""

import dataclasses
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shakedown.cluster.roster import Roster
from shakedown.core import private
from shakedown.core.errors import UntrustedError, UsageError
from shakedown.core.files import write_json, write_text
from shakedown.core.lease import Holder
from shakedown.core.paths import ServerPaths, StagePaths
from shakedown.core.verdict import Verdict
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import Endpoint, ServerOrder, ServerState, read_endpoint, read_state
from shakedown.inference.server import ensure, stop
from shakedown.processes.guard import look
from shakedown.training.checkpoint.checkpoints import Meta, find
from shakedown.training.stage.job import read_job
from tests.command import shakedown
from tests.security.neighbour import as_neighbour

REPOSITORY = Path(__file__).parents[2]
ENGINE = REPOSITORY / "tests" / "faults" / "fake_engine.py"


def endpoint_of(folder: Path, order: ServerOrder) -> Endpoint:
    """Of a server that is gone: nothing listens on its port."""
    return Endpoint(
        name=order.name,
        engine=order.engine,
        base_url="http://127.0.0.1:9",
        model=order.spec.model,
        served_name="policy",
        pid=2**22,
        node="elsewhere",
        host="127.0.0.1",
        port=9,
        started="2026-01-01T00:00:00+00:00",
        command=[],
        log=str(folder / "server.log"),
        lease={},
        launcher={"kind": "local"},
        capabilities={},
        order=order,
    )


def evil_order(mark: Path) -> ServerOrder:
    return ServerOrder("policy", "vllm", LaunchSpec("hub/model", prefix=("touch", str(mark))))


# --- who may have written a control file


def test_a_file_that_another_user_planted_in_a_shared_folder_is_refused(shared: Path) -> None:
    """Made by him, and then moved into the place of ours."""
    for name, read in (
        ("endpoint.json", lambda: read_endpoint(shared)),
        ("state.json", lambda: read_state(shared / "state.json")),
        ("job.json", lambda: read_job(shared / "job.json")),
    ):
        as_neighbour("sh", "-c", f"echo '{{}}' > {shared}/{name}")

        with pytest.raises(UntrustedError, match=f"{shared} can be written by everybody"):
            read()
        shared.chmod(0o755)
        with pytest.raises(UntrustedError, match=f"{name} belongs to nobody, not to root"):
            read()
        shared.chmod(0o777)


@pytest.mark.parametrize("mode", [0o664, 0o666, 0o622])
def test_a_file_that_others_can_write_is_refused_with_the_command_that_closes_it(
    mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "endpoint.json"
    write_json(path, {})
    path.chmod(mode)

    with pytest.raises(UntrustedError, match=f"chmod go-w {path}"):
        read_endpoint(path)


def test_a_file_in_a_folder_that_the_group_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    write_json(folder / "endpoint.json", {})
    folder.chmod(0o2775)

    done = shakedown("serve", "ensure", folder)

    assert done.returncode == 2
    assert f"{folder} can be written by its group (mode 2775)" in done.stderr
    assert f"next: check that everything in it is yours, then: chmod go-w {folder}" in done.stderr


@pytest.mark.parametrize("kind", ["link", "FIFO", "folder"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "endpoint.json"
    if kind == "link":
        write_json(tmp_path / "target", {})
        path.symlink_to(tmp_path / "target")
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.mkdir()

    with pytest.raises(UntrustedError, match=r"a link or a FIFO|not a regular file"):
        read_own_within_seconds(path)


def read_own_within_seconds(path: Path) -> None:
    caught: list[BaseException] = []

    def read() -> None:
        try:
            private.read_own(path)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            caught.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits"
    raise caught[0]


def test_a_file_of_ours_is_believed_in_tmp_and_behind_a_link_to_its_folder(shared: Path) -> None:
    shared.chmod(0o1777)
    write_text(shared / "job.json", "{}")
    (shared / "attempt").mkdir(0o700)
    write_text(shared / "attempt" / "job.json", "{}")
    (shared / "latest").symlink_to("attempt")

    assert private.read_own(shared / "job.json") == "{}"
    assert private.read_own(shared / "latest" / "job.json") == "{}"


def test_where_a_file_server_takes_this_user_for_another_his_own_files_are_believed(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root over NFS with root_squash: what it makes is nobody's."""
    write_text(shared / "own" / "state.json", "{}")
    for path in (shared / "own", shared / "own" / "state.json"):
        os.chown(path, 4242, -1)
    with pytest.raises(UntrustedError, match="belongs to user 4242"):
        private.read_own(shared / "own" / "state.json")

    real = os.fstat

    def squashed(descriptor: int) -> os.stat_result:
        facts = list(real(descriptor))
        facts[stat.ST_UID] = 4242
        return os.stat_result(facts)

    monkeypatch.setattr(os, "fstat", squashed)
    assert private.read_own(shared / "own" / "state.json") == "{}"


# --- the server


def test_what_names_a_servers_processes_ends_nothing_where_others_can_write_it(
    tmp_path: Path,
) -> None:
    folder = ServerPaths(tmp_path)
    victim = subprocess.Popen(["sleep", "60"], start_new_session=True)
    found = look(victim.pid)
    assert found is not None
    try:
        ServerState("running", "n", victim.pid).write(folder.state)
        folder.state.chmod(0o664)
        with pytest.raises(UntrustedError, match=r"state\.json can be written by its group"):
            stop(tmp_path)
        folder.state.unlink()
        folder.job.write_text("7\n")
        folder.job.chmod(0o666)
        with pytest.raises(UntrustedError, match="job can be written by everybody"):
            stop(tmp_path)
        folder.job.unlink()
        Roster(sessions={str(victim.pid): found.started}).write(folder.roster)
        folder.roster.chmod(0o664)
        with pytest.raises(UntrustedError, match=r"roster\.json can be written by its group"):
            stop(tmp_path)
        folder.roster.unlink()
        own = dataclasses.replace(Holder.here("the daemon"), pid=victim.pid, started=found.started)
        write_json(folder.daemon / ".lease" / "1", dataclasses.asdict(own))
        (folder.daemon / ".lease" / "1").chmod(0o664)
        with pytest.raises(UntrustedError, match="1 can be written by its group"):
            stop(tmp_path)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_a_command_out_of_the_servers_folder_is_never_run(tmp_path: Path) -> None:
    """A folder that was copied from somebody has this user's files, and his commands in them."""
    folder, mark = ServerPaths(tmp_path / "policy"), tmp_path / "ran"
    write_json(folder.endpoint, endpoint_of(folder.root, evil_order(mark)).to_json())
    write_text(folder.root / "order.json", evil_order(mark).to_text())

    with pytest.raises(UsageError, match="commands are not read from"):
        ensure(folder.root)
    done = shakedown("serve", "ensure", folder.root)
    assert done.returncode == 2
    assert "next: shakedown serve ensure" in done.stderr
    assert not mark.exists()


def test_a_server_that_is_gone_is_started_by_the_command_that_is_given(tmp_path: Path) -> None:
    folder, mark = ServerPaths(tmp_path / "policy"), tmp_path / "ran"
    write_json(folder.endpoint, endpoint_of(folder.root, evil_order(mark)).to_json())
    prefix = f"{sys.executable} {ENGINE} good"
    given = ("--engine", "vllm", "--model", "hub/model", "--prefix", prefix)
    try:
        done = shakedown("serve", "ensure", folder.root, *given)
        assert done.returncode == 0, done.stdout + done.stderr
        assert read_endpoint(folder.root).order.spec.prefix[1] == str(ENGINE)
        assert not mark.exists()
    finally:
        stop(folder.root)


def test_a_server_is_not_started_in_a_folder_that_others_can_write(shared: Path) -> None:
    done = shakedown("serve", "start", "--engine", "vllm", "--model", "hub/m", "--out", shared)

    assert done.returncode == 2
    assert f"{shared} can be written by everybody" in done.stderr
    assert list(shared.iterdir()) == []


# --- stages and their gates


def test_a_verdict_that_others_can_write_opens_no_gate(tmp_path: Path) -> None:
    path, out = tmp_path / "verdict.json", tmp_path / "accepted.json"
    Verdict("preflight", "PASS", "all is well").write(path)
    path.chmod(0o664)

    done = shakedown("accept", path, "--out", out)

    assert done.returncode == 2
    assert "can be written by its group" in done.stderr
    assert not out.exists()
    assert shakedown("verdict", path).returncode == 0  # shown it is, whoever wrote it


@pytest.mark.parametrize("place", ["step_000005", "step_000005/meta.json", "step_000005/engine"])
def test_a_checkpoint_that_others_can_change_starts_no_attempt(place: str, tmp_path: Path) -> None:
    stage = StagePaths(tmp_path / "sft")
    write_text(stage.checkpoints / "step_000005" / "engine" / ".metadata", "a pickle")
    write_json(stage.checkpoints / "step_000005" / "meta.json", {})
    (stage.checkpoints / place).chmod(0o775)

    with pytest.raises(UntrustedError, match=f"{place} can be written by its group"):
        private.make_private_tree(stage.checkpoints)


def test_the_description_of_a_checkpoint_that_others_can_write_is_no_damage(tmp_path: Path) -> None:
    """Damaged ones are set aside and the stage starts anew; here nothing is touched."""
    meta = Meta(5, 5, 1, {}, {})
    path = tmp_path / "step_000005" / "meta.json"
    write_json(path, dataclasses.asdict(dataclasses.replace(meta, digest=meta.own_digest())))
    assert find(tmp_path, {}).meta is not None
    path.chmod(0o664)

    with pytest.raises(UntrustedError, match=r"meta\.json can be written by its group"):
        find(tmp_path, {})


def test_train_refuses_a_run_that_the_group_can_write(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    run.chmod(0o775)

    done = shakedown("train", "sft", "--config", "config/config.yaml", "--run-dir", run)

    assert done.returncode == 2
    assert f"{run} can be written by its group" in done.stderr
