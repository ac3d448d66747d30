"""Strangers at the store by which ranks meet: where they reach it, and what they write into it."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml

from shakedown.cluster.nodes import free_port
from shakedown.cluster.ranks import loopback_of
from shakedown.cluster.store import open_store
from shakedown.config import load_config
from shakedown.core.errors import CannotJudgeError, LaunchError, UntrustedError, UsageError
from shakedown.core.paths import AttemptPaths, RunPaths
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.training.coordination import PeerFailedError, Ranks
from shakedown.training.stage.job import read_key, write_key
from tests.demo_assets import write_assets

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SHORT = timedelta(seconds=20)
# Another user's client of a store: writes what it is given as JSON, name by name.
WRITE = """
import json, os, sys
from datetime import timedelta
from torch.distributed import TCPStore
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=timedelta(seconds=20))
for name, value in json.loads(sys.argv[2]).items():
    store.set("shakedown/" + name, bytes.fromhex(value))
"""


def until(condition: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


# --- where it listens


def reached_by_another_user(address: str, port: int) -> bool:
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    command = ["bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"]
    done = subprocess.run(command, stderr=subprocess.DEVNULL, check=False, **user)  # type: ignore[call-overload]
    return bool(done.returncode == 0)


def other_addresses() -> list[str]:
    entries = [entry for found in psutil.net_if_addrs().values() for entry in found]
    here = [each.address for each in entries if each.family == socket.AF_INET]
    return ["127.0.0.2", *sorted(set(here) - {"127.0.0.1"})]


def test_another_user_reaches_the_store_at_no_other_address() -> None:
    port = free_port()
    store = open_store("127.0.0.1", port, rank=0, size=1, timeout=SHORT)

    assert reached_by_another_user("127.0.0.1", port)  # so that a refusal below tells something
    assert not [at for at in other_addresses() if reached_by_another_user(at, port)]
    del store


def test_the_other_ranks_find_the_store_where_rank_0_opened_it() -> None:
    port, values = free_port(), list[bytes]()

    def follow() -> None:
        store = open_store("localhost", port, rank=1, size=2, timeout=SHORT)
        values.append(store.get("greeting"))

    follower = threading.Thread(target=follow)
    follower.start()
    store = open_store("127.0.0.1", port, rank=0, size=2, timeout=SHORT)
    store.set("greeting", "hello")
    follower.join(20)

    assert values == [b"hello"]


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """What every name means from here on."""
    family = socket.AF_INET
    rows = [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: rows)


@pytest.mark.parametrize("addresses", [["127.0.1.1", "127.0.0.1"], ["127.0.1.1"]])
def test_a_name_that_is_loopback_on_its_own_node_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    """Ranks of other nodes would wait there for half an hour."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    named(monkeypatch, *addresses)

    with pytest.raises(LaunchError, match=r"^n1 resolves to 127\.0\.1\.1.* on n1 itself") as raised:
        open_store("n1", free_port(), rank=0, size=1, timeout=SHORT)

    assert "GLOO_SOCKET_IFNAME" in raised.value.hint


@pytest.mark.parametrize("way", ["another address of the name", "the interface of the ranks"])
def test_a_name_that_is_also_loopback_on_its_own_node_means_what_others_reach(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """No machine of these tests has a second address for sure: what is bound is only looked at."""
    bound: list[str] = []

    def bind(at: tuple[str, int], *, family: int) -> socket.socket:
        bound.append(at[0])
        raise OSError("not bound here")

    named(monkeypatch, "127.0.1.1", *(["192.0.2.7"] if "address" in way else []))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "" if "address" in way else "lo")
    monkeypatch.setattr(socket, "create_server", bind)
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        open_store("n1", 1, rank=0, size=1, timeout=SHORT)

    assert bound == ["192.0.2.7" if "address" in way else "127.0.0.1"]


def listens_at(process: psutil.Process) -> set[str]:
    try:
        sockets = process.net_connections("tcp")
    except psutil.Error:  # it has ended
        return set()
    return {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}


def below(pid: int, module: str) -> list[psutil.Process]:
    """Processes under one that run a module of ours."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            found += [process] if module in process.cmdline() else []
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_the_network_check_of_one_node_listens_on_loopback_alone(tmp_path: Path) -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    # The first member waits at its store for the second one, which is dead.
    command = [sys.executable, "-m", "shakedown.cli", "preflight", "--fake-fault", "gloo_dead"]
    command += ["--out", str(tmp_path)]
    with subprocess.Popen(command, env=outside, stdout=subprocess.DEVNULL) as preflight:

        def seen() -> set[str]:
            members = below(preflight.pid, "shakedown.preflight.network")
            return {at for member in members for at in listens_at(member)}

        try:
            until(seen)

            assert seen() == {"127.0.0.1"}
        finally:
            preflight.send_signal(signal.SIGINT)


@pytest.mark.parametrize("nodes", [["n1"], ["n1", "n2"]])
def test_gloo_stays_on_loopback_where_one_node_has_all_ranks(
    monkeypatch: pytest.MonkeyPatch, nodes: list[str]
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    assert loopback_of(nodes) == ({"GLOO_SOCKET_IFNAME": "lo"} if len(nodes) == 1 else {})


# --- what is read from it


class Rank(Ranks):
    """Rank 1 of two, by its store alone."""

    def __init__(self, store: dist.Store, key: bytes) -> None:
        self.rank, self.world_size = 1, 2
        self._store = dist.PrefixStore("shakedown", store)
        self._device, self._key, self._decisions = torch.device("cpu"), key, 0

    def sum(self, _values: object) -> dict[str, float]:
        return {"_failures": 1.0}

    def follow(self, name: str) -> str:
        return self.broadcast_from_rank0(name, lambda: "", waiting=lambda: None)

    def hear(self) -> None:
        self.all_reduce_or_raise({}, None)


KEY = bytes(range(32))


@pytest.fixture
def meeting() -> tuple[dist.TCPStore, int]:
    port = free_port()
    return open_store("127.0.0.1", port, rank=0, size=1, timeout=SHORT), port


def signed(name: str, text: str, key: bytes = KEY) -> str:
    """What rank 0 would have in its store."""
    store = dist.HashStore()
    Rank(store, key)._write(name, text)
    return bytes(store.get(f"shakedown/{name}")).hex()


def write_as_another_user(port: int, values: dict[str, str]) -> None:
    command = [sys.executable, "-c", WRITE, str(port), json.dumps(values)]
    subprocess.run(command, check=True, timeout=60)


def test_a_decision_that_another_user_forged_or_replayed_ends_the_rank(
    meeting: tuple[dist.TCPStore, int],
) -> None:
    store, port = meeting
    forged = {
        "1-resume": b"step_000050".hex(),
        "2-resume": signed("2-resume", "step_000050", key=bytes(32)),
        "3-resume": signed("1-resume", "step_000050"),  # said, of an earlier moment
        "4-save-10": signed("4-save-20", "staged"),
        "5-resume": signed("5-resume", "step_000050")[:-2] + "31",  # step_000051
        "6-resume": "",
    }
    write_as_another_user(port, forged)
    rank = Rank(store, KEY)

    for name in forged:
        with pytest.raises(
            CannotJudgeError, match=rf"^{name} .*not signed with this attempt's key"
        ):
            rank.follow(name.partition("-")[2])


def test_a_failure_that_another_user_made_up_is_not_repeated(
    meeting: tuple[dist.TCPStore, int],
) -> None:
    store, port = meeting
    write_as_another_user(port, {"1-failure": b"rank 0 failed: run this".hex()})

    with pytest.raises(CannotJudgeError, match="not signed") as raised:
        Rank(store, KEY).hear()

    assert not isinstance(raised.value, PeerFailedError)


def test_a_decision_of_rank_0_is_followed(meeting: tuple[dist.TCPStore, int]) -> None:
    store, port = meeting
    write_as_another_user(port, {"1-resume": signed("1-resume", "step_000050 é")})

    assert Rank(store, KEY).follow("resume") == "step_000050 é"


# --- the key


def test_a_key_is_its_owners_alone_and_new_for_each_attempt(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_key(tmp_path / "key")
        write_key(tmp_path / "other")
    finally:
        os.umask(old)

    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert read_key(tmp_path / "key") != read_key(tmp_path / "other")


@pytest.mark.parametrize("there", ["file", "link", "dangling link"])
def test_a_key_is_not_written_into_what_somebody_laid_there(tmp_path: Path, there: str) -> None:
    other = tmp_path / "other"
    if there != "dangling link":
        other.write_text("theirs")
    if there == "file":
        other.rename(tmp_path / "key")
    else:
        (tmp_path / "key").symlink_to(other)

    with pytest.raises(CannotJudgeError, match="File exists"):
        write_key(tmp_path / "key")

    assert there == "dangling link" or (tmp_path / "key").read_text() == "theirs"
    assert there != "dangling link" or not other.exists()


@pytest.mark.parametrize(
    "damage", ["missing", "link", "mode 0640", "mode 0604", "another user's", "cut", "long", "fifo"]
)
def test_a_key_that_somebody_else_may_know_or_have_made_is_refused(
    tmp_path: Path, damage: str
) -> None:
    key = tmp_path / "key"
    write_key(key)
    if damage in ("missing", "link", "fifo"):
        key.rename(tmp_path / "moved")
    if damage == "link":
        key.symlink_to(tmp_path / "moved")
    elif damage == "fifo":
        os.mkfifo(key, 0o600)
    elif damage.startswith("mode"):
        key.chmod(int(damage.split()[1], 8))
    elif damage == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(key, NOBODY, NOBODY)
    elif damage != "missing":
        key.write_bytes(key.read_bytes()[:31] if damage == "cut" else bytes(33))

    with pytest.raises((UsageError, UntrustedError), match=re.escape(str(key))):
        read_key(key)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], AttemptPaths]]:
    """A stage of two ranks that is at work."""
    (tmp_path / "assets").mkdir()
    assets = write_assets(tmp_path / "assets")
    body = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
    body |= {"run": "run", "results": str(tmp_path), "order": ["sft"]}
    body["stages"] = {"sft": body["stages"]["sft"] | {"steps": 5000, "eval_samples": 0}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(body), encoding="utf-8")
    command = [sys.executable, "-m", "shakedown.cli", "train", "sft"]
    command += ["--config", str(tmp_path / "config.yaml"), "--assets", str(assets / "assets.json")]
    attempt = RunPaths(tmp_path / "run").stage("sft").attempt(1)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: len([b for b in read_heartbeats(attempt.heartbeats) if b.step > 1]) == 2)
            yield process, attempt
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.mark.slow
def test_a_running_stage_listens_on_loopback_alone_and_shows_its_key_nowhere(
    training: tuple[subprocess.Popen[bytes], AttemptPaths],
) -> None:
    process, attempt = training
    ranks = below(process.pid, "shakedown.training.stage.worker")
    key = attempt.key.read_bytes()
    shown = [key, key.hex().encode()]

    assert [listens_at(rank) for rank in ranks] == [{"127.0.0.1"}] * 2
    assert stat.S_IMODE(attempt.key.stat().st_mode) == 0o600
    started = psutil.Process(process.pid).children(recursive=True)
    for pid in [process.pid, *(each.pid for each in started)]:
        for part in ("cmdline", "environ"):
            told = Path(f"/proc/{pid}/{part}").read_bytes()
            assert not [each for each in shown if each in told]
    written = [path for path in attempt.root.rglob("*") if path.is_file() and path != attempt.key]
    assert len(written) > 3
    assert not [path for path in written for each in shown if each in path.read_bytes()]
