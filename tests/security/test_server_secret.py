"""Who can talk to an inference server: each route asks for a secret that its user alone reads."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from shakedown.core.errors import ServerError, UntrustedError, UsageError
from shakedown.inference import auth
from shakedown.inference.auth import bearer, make_secret, read_secret
from shakedown.inference.engines import ENGINES, GenerationRequest, LaunchSpec, TokenEngine
from shakedown.inference.folder import Endpoint, ServerOrder, read_endpoint
from shakedown.inference.server import start, stop
from shakedown.rollout.agent_calls import Sampling
from shakedown.rollout.agent_proxy import AgentProxy
from shakedown.training.demo import write_model
from tests.command import shakedown
from tests.faults.test_serving_faults import order
from tests.security.other_user import NOBODY, as_nobody
from tests.unit.rollout.chat_engine import chatting

SECRET = "the-secret-of-a-server"
LOAD = {"method": "load_policy", "kwargs": {"weights_path": "/weights"}}


# --- the guard alone


class Application:
    """Answers 200 to everything, as an engine's own routes would; `bodies` that reached it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, _scope: auth.Message, receive: auth.Receive, send: auth.Send) -> None:
        message = await receive()
        self.bodies.append(message.get("body", b""))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"reached"})


async def ask(
    method: str, path: str, headers: dict[str, str] | None = None, body: Any = None
) -> tuple[int, Application]:
    """The status of a request that the guard sees, and what it guards."""
    application = Application()
    transport = httpx.ASGITransport(app=auth.Guard(application, SECRET))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await client.request(method, path, headers=headers, content=content)
    return reply.status_code, application


async def test_an_engine_without_metrics_is_counted_by_its_guard() -> None:
    guard = auth.Guard(Application(), SECRET, counts=True)
    transport = httpx.ASGITransport(app=guard)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://engine", headers=bearer(SECRET)
    ) as client:
        await client.get("/health")
        await client.post("/v1/completions", json={})
        told = await client.get("/metrics")
        refused = await client.get("/metrics", headers={"Authorization": "Bearer other"})

    assert told.text == "shakedown:requests_running 0\nshakedown:requests_total 1\n"
    assert refused.status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": SECRET},
        {"Authorization": f"Basic {SECRET}"},
        {"Authorization": f"Bearer {SECRET}x"},
        {"Authorization": f"Bearer {SECRET[:-1]}"},
        {"Authorization": "Bearer "},
        {"x-api-key": ""},
        {"x-api-key": "None"},
        {"Cookie": f"Authorization=Bearer {SECRET}"},
    ],
)
async def test_a_request_without_the_secret_reaches_no_route(headers: dict[str, str]) -> None:
    for method, path in [*auth.ROUTES, ("GET", "/openapi.json"), ("OPTIONS", "/v1/models")]:
        status, application = await ask(method, path, headers)

        assert status == 401
        assert not application.bodies


@pytest.mark.parametrize("headers", [{"Authorization": f"bearer {SECRET}"}, {"x-api-key": SECRET}])
async def test_the_secret_is_taken_as_openai_and_anthropic_clients_send_it(
    headers: dict[str, str],
) -> None:
    status, application = await ask("POST", "/v1/messages", headers, {"max_tokens": 1})

    assert (status, application.bodies) == (200, [b'{"max_tokens": 1}'])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/server_info"),
        ("POST", "/sleep"),
        ("POST", "/update_weights"),
        ("POST", "/init_weight_transfer_engine"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/load_model"),
        ("POST", "/v1//completions"),
        ("POST", "/v1/completions/"),
        ("GET", "/v1/completions"),
        ("POST", "/metrics"),
    ],
)
async def test_a_route_that_nobody_needs_is_refused_with_the_secret_too(
    method: str, path: str
) -> None:
    status, application = await ask(method, path, bearer(SECRET))

    assert status == 403
    assert not application.bodies


@pytest.mark.parametrize(
    "call",
    [
        {**LOAD, "method": "execute_method"},
        {**LOAD, "args": ["/other"]},
        {**LOAD, "timeout": 1},
        {"method": "load_policy"},
        {"method": "load_policy", "kwargs": {"weights_path": ["/weights"]}},
        {"method": "load_policy", "kwargs": {"weights_path": "/weights", "load_format": "pt"}},
        {"method": ["load_policy"], "kwargs": LOAD["kwargs"]},
        [LOAD],
        None,
        b"{",
        b"[" * 100_000,
        {"method": "load_policy", "kwargs": {"weights_path": "/" * (1 << 17)}},
    ],
    ids=str,
)
async def test_a_worker_s_other_methods_are_refused_with_the_secret_too(call: Any) -> None:
    status, application = await ask("POST", "/collective_rpc", bearer(SECRET), call)

    assert status == 403
    assert not application.bodies


async def test_the_call_that_loads_weights_reaches_the_engine_whole() -> None:
    status, application = await ask("POST", "/collective_rpc", bearer(SECRET), LOAD)

    assert status == 200
    assert [json.loads(body) for body in application.bodies] == [LOAD]


async def test_a_websocket_is_closed_before_it_is_accepted() -> None:
    application, sent = Application(), list[auth.Message]()

    async def send(message: auth.Message) -> None:
        sent.append(message)

    async def receive() -> auth.Message:
        return {"type": "websocket.connect"}

    key = [(b"authorization", f"Bearer {SECRET}".encode())]
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": key}
    await auth.Guard(application, SECRET)(scope, receive, send)

    assert [message["type"] for message in sent] == ["websocket.close"]
    assert not application.bodies


@pytest.mark.parametrize("name", ENGINES)
def test_every_request_of_an_engine_s_adapter_is_let_through(name: str) -> None:
    engine = ENGINES[name]
    requests = [engine.probe("policy")]
    if isinstance(engine, TokenEngine):
        requests += [engine.generate("policy", GenerationRequest([1], 1)), *engine.interrupt()]
        requests += [engine.score("policy", [1, 2]), *engine.update_weights("/weights")]

    sent = {(each.method, each.path.partition("?")[0]) for each in requests}

    assert sent | {("GET", engine.health_path)} <= auth.ROUTES


# --- the file


def plant(kind: str, path: Path, folder: Path) -> None:
    """What others may have put where the secret will be."""
    if kind == "link":
        (folder / "victim").write_text("another-file-of-the-user\n")
        (folder / "victim").chmod(0o600)
        path.symlink_to(folder / "victim")
    elif kind == "FIFO":
        os.mkfifo(path, 0o600)
    elif kind != "nothing":
        path.write_text("" if kind == "empty" else "known-to-others\n")
        path.chmod(0o640 if kind == "open to the group" else 0o600)
        if kind == "another user's":
            os.chown(path, NOBODY, NOBODY)


PLANTED = ["nothing", "link", "FIFO", "empty", "open to the group", "another user's"]


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_secret_is_refused_by_clients_and_replaced_at_the_start(
    kind: str, tmp_path: Path
) -> None:
    if kind == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path = tmp_path / "secret"
    plant(kind, path, tmp_path)

    with pytest.raises((UsageError, UntrustedError)) as refused:
        read_secret(path)
    make_secret(path)

    assert str(path) in str(refused.value)
    assert "known-to-others" not in str(refused.value)
    assert len(read_secret(path)) >= 40
    assert path.stat().st_mode & 0o777 == 0o600
    victim = tmp_path / "victim"
    assert not victim.exists() or victim.read_text() == "another-file-of-the-user\n"


def test_a_server_started_again_keeps_its_secret_for_clients_of_the_life_before(
    tmp_path: Path,
) -> None:
    make_secret(tmp_path / "secret")
    first = read_secret(tmp_path / "secret")

    make_secret(tmp_path / "secret")

    assert read_secret(tmp_path / "secret") == first


@pytest.mark.parametrize("key", ["two words", "line\nfeed", "schlüssel"])
def test_a_key_that_no_header_carries_is_bad_input_and_not_repeated(
    key: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        make_secret(tmp_path / "secret", key)

    assert key not in str(refused.value)


# --- keys of the user's choice, with a stand-in engine


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "policy"
    yield root
    if root.is_dir():
        stop(root)


def test_a_key_of_the_user_s_choice_is_the_server_s_and_a_new_one_replaces_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "first-choice")
    first = start(order(), folder)
    monkeypatch.setenv("VLLM_API_KEY", "second-choice")
    second = start(order(), folder)

    assert second.pid != first.pid
    assert second.api_key() == "second-choice"
    for key, status in (("first-choice", 401), ("second-choice", 200)):
        assert httpx.get(f"{second.base_url}/health", headers=bearer(key)).status_code == status


@pytest.mark.parametrize("argument", ["--api-key KEY-KEY", "--api_key=KEY-KEY", "--host 1.2.3.4"])
def test_a_key_or_an_address_among_the_engine_s_arguments_is_refused(
    argument: str, folder: Path
) -> None:
    done = shakedown(
        *("serve", "start", "--engine", "vllm", "--model", "hub/model", "--out", folder),
        f"--extra-args={argument}",
    )

    assert done.returncode == 2
    assert "serve.extra_args: --" in done.stderr
    assert "VLLM_API_KEY" in done.stderr
    assert "KEY-KEY" not in done.stdout + done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104 - refused
def test_a_server_on_every_address_is_refused(host: str, folder: Path) -> None:
    done = shakedown(
        *("serve", "start", "--engine", "vllm", "--model", "hub/model", "--out", folder),
        *("--host", host),
    )

    assert done.returncode == 2
    assert f"--host {host}: a server listens on one address" in done.stderr


def test_an_engine_that_answers_without_its_secret_is_refused_and_ended(folder: Path) -> None:
    with pytest.raises(ServerError, match="answers without its secret"):
        start(order("open"), folder)

    assert not (folder / "endpoint.json").exists()


def test_any_engine_on_uvicorn_is_guarded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's command, and its routes in a program of the same build."""
    package = tmp_path / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(
        "import sys, uvicorn\n"
        "async def app(scope, receive, send):\n"
        "    await send({'type': 'http.response.start', 'status': 200, 'headers': []})\n"
        "    await send({'type': 'http.response.body', 'body': b'{}'})\n"
        "if __name__ == '__main__':\n"
        "    port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        "    uvicorn.run(app, host='127.0.0.1', port=port, lifespan='off')\n"
    )
    paths = f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", paths)

    endpoint = start(ServerOrder("policy", "sglang", LaunchSpec("hub/model")), folder)

    routes = ["/update_weights_from_disk", "/generate", "/update_weights_from_tensor"]
    statuses = [
        [httpx.post(f"{endpoint.base_url}{route}", headers=bearer(key)).status_code]
        for key in ("", endpoint.api_key())
        for route in routes
    ]
    assert statuses == [[401], [401], [401], [200], [200], [403]]


def test_an_agent_s_exception_that_quotes_its_key_is_written_without_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "    async def run(self, data, **more):\n"
        "        raise ValueError(f'cannot use {more}')\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    with chatting() as engine:
        done = shakedown(
            *("agent", "run", f"{tmp_path / 'own.py'}:Own", "--data", tmp_path / "rows.jsonl"),
            *("--base-url", f"{engine.url}/v1", "--out", folder),
        )

    written = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert done.returncode == 1
    assert "cannot use" in written
    assert SECRET not in done.stdout + done.stderr + written


# --- the recording proxy


async def test_the_proxy_asks_for_a_key_and_carries_the_engine_s(tmp_path: Path) -> None:
    with chatting() as engine:
        engine.secret = SECRET
        async with (
            AgentProxy(
                engine.url, Sampling(1.0, 8), lambda: 0, timeout=20, api_key=SECRET
            ) as proxy,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy.port}") as client,
        ):
            key, own = proxy.open()
            chat = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}]}

            async def statuses(base: str, headers: dict[str, str]) -> list[int]:
                models = await client.get(f"{base}/models", headers=headers)
                reply = await client.post(f"{base}/chat/completions", headers=headers, json=chat)
                return [models.status_code, reply.status_code]

            assert await statuses("/v1", {}) == [403, 403]
            assert await statuses("/v1", bearer(SECRET)) == [403, 403]
            assert await statuses("/e/wrong/v1", {}) == [403, 403]
            assert await statuses(own, {}) == [200, 200]
            assert await statuses("/v1", bearer(key)) == [200, 200]
            assert await statuses("/v1", bearer(proxy.api_key)) == [200, 403]
            proxy.close(key)
            assert await statuses(own, {}) == [403, 403]


# --- vLLM itself


@pytest.fixture(scope="module")
def vllm() -> Iterator[Endpoint]:
    """In folders that everybody can enter: the file's own mode is what keeps others out."""
    with (
        tempfile.TemporaryDirectory(prefix="served-") as place,
        pytest.MonkeyPatch.context() as environment,
    ):
        root = Path(place)
        # As users export it for their training: an engine's collectives would listen there.
        for name, link in psutil.net_if_stats().items():
            if link.isup and name != "lo":
                environment.setenv("GLOO_SOCKET_IFNAME", name)
        write_model(root / "model", seed=0)
        spec = LaunchSpec(str(root / "model"), kv_cache_gb=0.25)
        yield start(ServerOrder("policy", "vllm", spec), root / "server")
        stop(root / "server")


def routes_of(log: Path) -> list[tuple[str, str]]:
    """What vLLM says that it serves: (method, path)."""
    lines = re.findall(r"Route: (\S+), Methods: (.+)", log.read_text())
    return [(method, path) for path, methods in lines for method in methods.split(", ")]


def status_of(base_url: str, method: str, path: str, key: str = "") -> int:
    url = urlsplit(base_url)
    assert url.hostname
    headers = {"Content-Type": "application/json", **bearer(key)}
    with contextlib.closing(http.client.HTTPConnection(url.hostname, url.port or 80)) as connection:
        connection.request(method, path, body=b"{}", headers=headers)
        return connection.getresponse().status


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_answers_another_user_on_none_of_its_routes(vllm: Endpoint) -> None:
    routes = routes_of(Path(vllm.log))
    assert len(routes) > 40
    assert {("POST", "/collective_rpc"), ("POST", "/update_weights")} <= set(routes)

    found = as_nobody(lambda: [status_of(vllm.base_url, *route) for route in routes])

    assert found == [401] * len(routes)


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_s_other_routes_are_closed_to_its_own_user_too(vllm: Endpoint) -> None:
    others = [route for route in routes_of(Path(vllm.log)) if route not in auth.ROUTES]

    found = [status_of(vllm.base_url, *route, vllm.api_key()) for route in others]

    assert found == [403] * len(others)
    reply = httpx.post(
        f"{vllm.base_url}/collective_rpc",
        headers=bearer(vllm.api_key()),
        json={"method": "get_model_inspection"},
    )
    assert reply.status_code == 403


@pytest.mark.vllm
@pytest.mark.slow
def test_another_user_finds_the_secret_nowhere(vllm: Endpoint) -> None:
    root, key = Path(vllm.secret).parent, vllm.api_key()
    for folder in (root.parent, root):
        folder.chmod(0o755)
    candidates = [path for path in root.rglob("*") if path.is_file()]
    candidates += [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]

    def spied() -> list[str]:
        """What holds it, among all that somebody can read who knows what to look for."""
        found = []
        for path in candidates:
            with contextlib.suppress(OSError):
                if key.encode() in path.read_bytes():
                    found.append(str(path))
        return found

    assert spied() == [vllm.secret]
    assert as_nobody(spied) == []


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_listens_on_loopback_alone(vllm: Endpoint) -> None:
    """Its own collectives too, which ask nobody for a secret."""
    server = psutil.Process(vllm.pid)
    family = [server, *server.children(recursive=True)]

    listening = {
        found.laddr.ip
        for process in family
        for found in process.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    }

    assert listening == {"127.0.0.1"}


@pytest.mark.vllm
@pytest.mark.slow
def test_a_command_that_names_the_server_by_its_url_says_which_key_it_needs(
    vllm: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "1+1="}]}\n')
    environment = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"}
    command = [sys.executable, "-m", "shakedown.cli", "compare", "--engine", vllm.base_url]
    command += ["--reference", f"transformers:{vllm.model}", "--data", str(tmp_path / "rows.jsonl")]

    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 3
    assert "refuses the key: HTTP 401" in done.stdout + done.stderr
    assert "OPENAI_API_KEY" in done.stdout + done.stderr
    assert read_endpoint(Path(vllm.secret).parent) == vllm
