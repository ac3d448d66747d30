"""An HTTPS server of this machine with a certificate of a CA of its own, which nobody trusts."""

import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")


@dataclass
class Https:
    """`ca`: a file that makes it trusted. `got`: (headers, body) of each request, answered 204."""

    url: str
    ca: Path
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)


@contextmanager
def https_server(folder: Path) -> Iterator[Https]:
    """Its files are made in `folder`; the certificate is for 127.0.0.1 alone."""
    _make_certificates(folder)
    got: list[tuple[dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((dict(self.headers), body))
            self.send_response(204)
            self.end_headers()

        def log_request(self, *_: object) -> None:
            """Nothing on standard error."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Https(f"https://127.0.0.1:{server.server_port}/alarm", folder / "ca.pem", got)
        server.shutdown()
        thread.join()


def _make_certificates(folder: Path) -> None:
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    new = "openssl req -newkey rsa:2048 -nodes"
    sign = "openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2"
    for command in (
        f"{new} -x509 -keyout ca.key -out ca.pem -days 2 -subj /CN=lab"
        " -addext keyUsage=critical,keyCertSign",
        f"{new} -keyout server.key -out server.csr -subj /CN=hooks",
        f"{sign} -extfile names -out server.pem",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
