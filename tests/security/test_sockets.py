"""The census of sockets itself: what it sees. The demo's tests take one of a whole run."""

import os
import subprocess
import sys

import pytest

from tests.security.census import Census

LISTENS = """
import os, socket, sys
if sys.argv[1] == "detached" and os.fork():
    sys.exit()
os.setsid()
server = socket.create_server((sys.argv[2], 0))
print("listens", flush=True)
os.read(0, 1)
"""


@pytest.mark.parametrize("how", ["a child", "detached"])
@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])  # noqa: S104 - what is looked for
def test_a_listener_of_the_run_is_seen_with_its_address(how: str, address: str) -> None:
    census = Census()
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS, how, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **census.environment},
        start_new_session=how != "a child",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"listens\n"

    census.look()
    process.communicate(b"x")

    (found,) = census.listeners
    assert found.address == address
    assert how in found.program
    assert (found in census.beyond_loopback()) == (address == "0.0.0.0")  # noqa: S104


def test_a_listener_of_another_program_is_no_part_of_the_run() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS, "a child", "127.0.0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    census = Census()

    census.look()
    process.communicate(b"x")

    assert not census.listeners
