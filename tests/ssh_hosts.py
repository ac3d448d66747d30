"""Private sshd daemons on loopback, each a host of its own name for the `ssh` that is on PATH."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from shakedown.cluster.nodes import free_port

SOURCE = Path(__file__).parents[1] / "src"
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
_CLIENT = shutil.which("ssh")
_DAEMON = """
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
# Folders for temporary files can be written by everybody.
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
AllowAgentForwarding yes
PidFile none
SetEnv PYTHONPATH={source}
"""
# What a user may have set; the collector's own options come before.
_CLIENT_CONFIG = """
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  HostKeyAlias private
  ForwardAgent yes
  RemoteCommand echo instead
  LocalCommand touch {folder}/local
  PermitLocalCommand yes
"""


class Hosts:
    """Daemons by host name; `bin` holds an `ssh` that knows them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self._daemons: list[subprocess.Popen[bytes]] = []
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd does not start without it
        for name in ("host_key", "key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        (folder / "known_hosts").write_text(f"private {(folder / 'host_key.pub').read_text()}")
        (folder / "config").write_text(_CLIENT_CONFIG.format(folder=folder))
        self.bin.mkdir()
        (self.bin / "ssh").write_text(f'#!/bin/sh\nexec {_CLIENT} -F {folder}/config "$@"\n')
        (self.bin / "ssh").chmod(0o755)

    def add(self, *names: str, port: int) -> None:
        """Hosts that are behind `port` of this machine."""
        self.configure(f"Host {' '.join(names)}\n  HostName 127.0.0.1\n  Port {port}\n")

    def configure(self, text: str) -> None:
        """Put `text` before the rest of ssh's configuration: what comes first holds."""
        config = self.folder / "config"
        config.write_text(text + config.read_text())

    def start(self, *names: str, settings: str = "", inside: Sequence[str] = ()) -> None:
        """A daemon on a free port; `inside`: a command that it runs in."""
        port = free_port()
        config = self.folder / f"sshd-{port}"
        config.write_text(_DAEMON.format(folder=self.folder, source=SOURCE) + settings)
        command = [*inside, str(SSHD), "-D", "-e", "-f", str(config), "-p", str(port)]
        with (self.folder / f"sshd-{port}.log").open("wb") as log:
            self._daemons.append(subprocess.Popen(command, stderr=log))
        self._await(port)
        self.add(*names, port=port)

    def _await(self, port: int) -> None:
        deadline = time.monotonic() + 60
        while self._daemons[-1].poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.05)
        raise AssertionError((self.folder / f"sshd-{port}.log").read_text())

    def end(self) -> None:
        for daemon in self._daemons:
            daemon.kill()  # unshare takes no other signal
            daemon.wait()


@contextlib.contextmanager
def private_hosts(folder: Path) -> Iterator[Hosts]:
    made = Hosts(folder)
    try:
        yield made
    finally:
        made.end()
