"""Strangers at the store by which ranks meet: where they reach it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from shakedown.cluster.nodes import free_port
from shakedown.cluster.ranks import loopback_of
from shakedown.cluster.store import open_store
from shakedown.core.errors import LaunchError

NOBODY = 65534
SHORT = timedelta(seconds=20)


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

    with pytest.raises(LaunchError, match=r"^n1 is 127\.0\.1\.1.* on n1 itself") as raised:
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
