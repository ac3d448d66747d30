"""What a persistent server does when something goes wrong: real processes, a stand-in engine."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from shakedown.core.errors import ServerError, UsageError
from shakedown.core.lease import Holder, holder_of
from shakedown.inference.auth import bearer
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import ServerOrder, read_endpoint, read_state
from shakedown.inference.idle_limit import IdleTimer
from shakedown.inference.server import ensure, in_use, start, status, stop
from tests.command import shakedown
from tests.workflow.helpers import processes_that_mention

ENGINE = Path(__file__).with_name("fake_engine.py")


def order(
    mode: str = "good",
    *,
    port: int = 0,
    lease: float = 60.0,
    ready_timeout: float = 30.0,
    grace: float = 10.0,
) -> ServerOrder:
    spec = LaunchSpec("hub/model", prefix=(sys.executable, str(ENGINE), mode), port=port)
    return ServerOrder(
        "policy", "vllm", spec, lease=lease, ready_timeout=ready_timeout, grace=grace
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "policy"
    yield root
    if root.is_dir():
        stop(root)


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def test_stop_leaves_no_process_of_the_server(folder: Path) -> None:
    pids = family(start(order(), folder).pid)

    stop(folder)

    assert len(pids) > 1, "the engine had no child: nothing was tested"
    assert not [pid for pid in pids if lives(pid)]
    assert not status(folder).alive


def test_server_that_ignores_sigterm_is_killed(folder: Path) -> None:
    pids = family(start(order("stubborn", grace=1.0), folder).pid)

    stop(folder)

    assert not [pid for pid in pids if lives(pid)]


def test_started_twice_is_the_same_server(folder: Path) -> None:
    first = start(order(), folder)

    second = start(order(), folder)

    assert second.pid == first.pid


def test_other_order_replaces_the_server(folder: Path) -> None:
    first = start(order(), folder)

    second = start(order(lease=61.0), folder)

    assert second.pid != first.pid
    assert not lives(first.pid)


def test_port_in_use_is_named_and_nothing_is_left(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"127.0.0.1:{port}: Address already in use"):
            start(order(port=port), folder)

    assert not (folder / "endpoint.json").exists()
    assert not status(folder).alive


def test_engine_that_exits_is_reported_with_its_log_and_the_likely_cause(folder: Path) -> None:
    with pytest.raises(ServerError) as caught:
        start(order("crash"), folder)

    message = str(caught.value)
    assert "exit code 1" in message
    assert "| RuntimeError: Engine core initialization failed" in message
    assert "likely cause: out of memory" in message
    assert "next: lower serve.kv_cache_gb" in message


def test_engine_that_never_answers_is_ended_after_the_timeout(folder: Path) -> None:
    with pytest.raises(ServerError, match="did not answer a generation within 2 s"):
        start(order("silent", ready_timeout=2.0), folder)

    state = read_state(folder / "state.json")
    assert state is not None
    assert not lives(state.pid)


def test_model_that_the_server_does_not_know_is_refused_without_waiting(folder: Path) -> None:
    with pytest.raises(ServerError, match=r"refuses a generation: .*does not exist"):
        start(order("refuse"), folder)


def test_missing_model_folder_is_bad_input_and_starts_nothing(tmp_path: Path) -> None:
    done = shakedown(
        "serve",
        "start",
        "--engine",
        "vllm",
        "--model",
        tmp_path / "none",
        "--out",
        tmp_path / "out",
    )

    assert done.returncode == 2
    assert "does not exist" in done.stderr
    assert not (tmp_path / "out" / "state.json").exists()


def test_server_that_dies_in_use_is_named_with_its_time_and_cause(folder: Path) -> None:
    endpoint = start(order(), folder)
    before = endpoint_time(folder)
    with open(endpoint.log, "a") as log:
        log.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
        log.write("INFO: another line\n" * 20_000)

    with pytest.raises(ServerError, match=r"the server died at \d\d:\d\d:\d\d: ") as caught:
        kill_in_use(folder)

    assert "SIGKILL" in str(caught.value)
    assert "likely cause: out of memory: the GPU's memory is full" in str(caught.value)
    assert "no answer" in str(caught.value)
    assert endpoint_time(folder) == before
    assert until(lambda: "died at" in status(folder).sentence)


def kill_in_use(folder: Path) -> None:
    with in_use(folder, order):
        state = read_state(folder / "state.json")
        assert state is not None
        os.kill(state.pid, signal.SIGKILL)
        assert until(lambda: read_endpoint(folder).ended != "")
        raise ServerError("no answer")


def test_server_with_a_damaged_endpoint_says_how_it_ended(folder: Path) -> None:
    start(order(), folder)
    (folder / "endpoint.json").write_text("{")

    assert stop(folder) == "stopped"
    assert "was ended at" in status(folder).sentence


def endpoint_time(folder: Path) -> int:
    return (folder / "endpoint.json").stat().st_mtime_ns


def test_lease_that_runs_out_ends_the_server(folder: Path) -> None:
    pids = family(start(order(lease=4.0), folder).pid)

    assert until(lambda: not any(lives(pid) for pid in pids))
    assert until(lambda: not status(folder).alive)
    assert "the idle limit was reached" in status(folder).sentence


def test_server_that_is_only_asked_by_its_url_outlives_its_lease(folder: Path) -> None:
    endpoint = start(order(lease=2.0), folder)
    url, headers = f"{endpoint.base_url}/v1/completions", bearer(endpoint.api_key())

    for _ in range(10):
        assert httpx.post(url, json={}, headers=headers).status_code == 200
        time.sleep(0.5)

    assert lives(endpoint.pid)
    # Not by `status`, whose generation is a use too.
    assert until(lambda: not lives(endpoint.pid))
    assert until(lambda: "the idle limit was reached" in status(folder).sentence)


def test_server_in_use_outlives_its_lease(folder: Path) -> None:
    endpoint = start(order(lease=2.0), folder)

    with IdleTimer(folder / "lease", every=0.2):
        time.sleep(4.0)
        assert lives(endpoint.pid)


def daemon_of(folder: Path) -> Holder:
    found = holder_of(folder / "daemon")
    assert found is not None
    return found


def pid_in_state(folder: Path) -> int:
    state = read_state(folder / "state.json") if (folder / "state.json").exists() else None
    return state.pid if state is not None else 0


@contextlib.contextmanager
def starting(folder: Path, mode: str) -> Iterator[subprocess.Popen[str]]:
    """A `serve start` in another terminal, whose server runs and has not answered."""
    begun = subprocess.Popen(
        [sys.executable, "-m", "shakedown.cli", *map(str, start_command(folder, mode))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert until(lambda: (pid := pid_in_state(folder)) > 0 and len(family(pid)) > 1)
        yield begun
    finally:
        begun.kill()
        begun.communicate()


def start_command(folder: Path, mode: str) -> list[object]:
    engine = ["--engine", "vllm", "--model", "hub/model"]
    prefix = f"{sys.executable} {ENGINE} {mode}"
    return ["serve", "start", *engine, "--out", folder, "--prefix", prefix]


@pytest.mark.parametrize("second", ["start", "stop"])
def test_second_terminal_is_told_of_the_start_and_changes_nothing(
    folder: Path, second: str
) -> None:
    with starting(folder, "silent") as first:
        server = pid_in_state(folder)
        given = start_command(folder, "good") if second == "start" else ["serve", "stop", folder]

        done = shakedown(*given)

        assert done.returncode == 2
        assert f"is in use: shakedown serve start (pid {first.pid} on " in done.stderr
        assert f"kill {first.pid}" in done.stderr
        assert first.poll() is None
        assert lives(server)
        assert not (folder / "verdict.json").exists()


def test_of_two_starts_at_once_one_server_is_left(folder: Path) -> None:
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "shakedown.cli", *map(str, start_command(folder, "good"))],
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [each.communicate(timeout=120)[1] for each in both]

    codes = [each.returncode for each in both]
    assert codes in ([0, 0], [0, 2], [2, 0])  # 0: the first one's server answered before
    assert all(
        "is in use: shakedown serve start" in said[codes.index(2)] for _ in codes if 2 in codes
    )
    assert read_endpoint(folder).pid == pid_in_state(folder)
    mentioned = processes_that_mention(f"shakedown.inference.daemon {folder}")
    assert len(mentioned) == 1


def test_restart_is_waited_for_and_its_server_is_used(folder: Path) -> None:
    first = start(order(), folder)
    os.kill(first.pid, signal.SIGKILL)
    assert until(lambda: not status(folder).alive)
    with ThreadPoolExecutor(3) as pool:
        used = list(pool.map(lambda _: ensure(folder, order).pid, range(3)))

    assert set(used) == {pid_in_state(folder)}


@pytest.mark.parametrize("guard_too", [False, True])
def test_killed_starter_and_daemon_are_taken_over_and_their_server_ends_first(
    folder: Path, guard_too: bool
) -> None:
    with starting(folder, "deaf") as first:
        daemon, left = daemon_of(folder).pid, pid_in_state(folder)
        guards = [p.pid for p in psutil.Process(daemon).children() if "guard.py" in p.cmdline()[-2]]
        assert len(guards) == 1
        for pid in (*(guards if guard_too else []), first.pid, daemon):
            os.kill(pid, signal.SIGKILL)
        first.wait(30)
        assert until(lambda: not lives(daemon))
        assert lives(left)  # deaf to the guard's SIGTERM

        second = start(order(), folder)

        assert not lives(left)
        assert second.pid == pid_in_state(folder)
        assert status(folder).answers


def test_server_in_a_container_is_not_taken_for_a_dead_one(folder: Path) -> None:
    """Its process numbers mean nothing here."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a space of process ids")
    outer = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable]
        + ["-c", IN_CONTAINER, str(folder)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "answers\n"
        endpoint = read_endpoint(folder)
        assert status(folder).answers
        assert start(order(), folder).started == endpoint.started
        assert stop(folder) == "stopped"
        assert httpx_refuses(endpoint.base_url)
    finally:
        outer.communicate("")


IN_CONTAINER = """
import sys
from pathlib import Path
from tests.faults.test_serving_faults import order, start
start(order(), Path(sys.argv[1]), say=lambda line: None)
print("answers", flush=True)
sys.stdin.read()
"""


def httpx_refuses(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.ConnectError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_server_ends_with_its_daemon(folder: Path, number: signal.Signals) -> None:
    pids = family(start(order(), folder).pid)

    os.kill(daemon_of(folder).pid, number)

    assert until(lambda: not any(lives(pid) for pid in pids))
    assert until(lambda: not status(folder).alive)


def test_killed_server_is_seen_and_started_again_where_it_was(folder: Path) -> None:
    first = start(order(), folder)
    before = (folder / "endpoint.json").stat().st_mtime_ns
    os.kill(first.pid, signal.SIGKILL)
    assert until(lambda: not status(folder).alive)

    second = ensure(folder / "endpoint.json", order)

    assert second.base_url == first.base_url
    assert second.pid != first.pid
    assert (folder / "endpoint.json").stat().st_mtime_ns == before
    assert status(folder).answers


def test_ensure_changes_nothing_while_the_server_answers(folder: Path) -> None:
    start(order(), folder)
    before = (folder / "endpoint.json").stat()

    ensure(folder, order)

    after = (folder / "endpoint.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_restart_takes_another_port_when_a_stranger_has_the_old_one(folder: Path) -> None:
    first = start(order(), folder)
    stop(folder)

    with socket.create_server((first.host, first.port)):
        second = ensure(folder, order)

    assert second.port != first.port
    assert read_endpoint(folder).base_url == second.base_url


def test_killed_starter_leaves_a_server_that_its_lease_ends(folder: Path) -> None:
    folder.mkdir()
    script = (
        "from tests.faults.test_serving_faults import order, start; from pathlib import Path; "
        f"start(order('silent', lease=2.0), Path({str(folder)!r}))"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    try:
        assert until(lambda: (s := read_state(folder / "state.json")) is not None and s.pid > 0)
    finally:
        starter.kill()
        starter.wait()
    state = read_state(folder / "state.json")
    assert state is not None

    assert until(lambda: not lives(state.pid))


def test_log_of_the_life_before_is_kept(folder: Path) -> None:
    with contextlib.suppress(ServerError):
        start(order("crash"), folder)

    start(order(), folder)

    assert "out of memory" in (folder / "server.previous.log").read_text()
    assert "out of memory" not in (folder / "server.log").read_text()


def test_damaged_endpoint_is_bad_input(folder: Path) -> None:
    start(order(), folder)
    path = folder / "endpoint.json"
    path.write_text(path.read_text()[:40])

    with pytest.raises(UsageError, match="is not JSON"):
        ensure(folder, order)


def test_read_only_place_is_a_clear_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("no folder")

    done = shakedown(
        "serve", "start", "--engine", "vllm", "--model", "hub/model", "--out", blocker / "policy"
    )

    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert str(blocker) in done.stdout + done.stderr


def test_command_writes_a_blocked_verdict_when_the_server_does_not_start(folder: Path) -> None:
    done = shakedown(
        *("serve", "start", "--engine", "vllm", "--model", "hub/model", "--out", folder),
        *("--prefix", f"{sys.executable} {ENGINE} crash"),
    )

    verdict = json.loads((folder / "verdict.json").read_text())
    assert done.returncode == 3
    assert verdict["status"] == "UNKNOWN"
    assert "likely cause: out of memory" in verdict["summary"]
    assert "Engine core initialization failed" in done.stderr


def test_command_starts_tells_and_stops(folder: Path) -> None:
    started = shakedown(
        *("serve", "start", "--engine", "vllm", "--model", "hub/model", "--out", folder),
        *("--prefix", f"{sys.executable} {ENGINE} good"),
    )
    told = shakedown("serve", "status", folder)
    kept = shakedown("serve", "ensure", folder)
    stopped = shakedown("serve", "stop", folder)
    after = shakedown("serve", "status", folder)

    assert [r.returncode for r in (started, told, kept, stopped, after)] == [0, 0, 0, 0, 1]
    assert json.loads((folder / "verdict.json").read_text())["status"] == "PASS"
    assert "answers at http://127.0.0.1:" in told.stdout
    assert "stopped on request" in after.stdout
