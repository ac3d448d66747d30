"""A server of somebody else: looked at, written down, used, and left alone."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from shakedown.core.errors import ServerError, UsageError
from shakedown.core.paths import ServerPaths
from shakedown.inference.engines import LaunchSpec, get_engine
from shakedown.inference.external import attach
from shakedown.inference.folder import ServerOrder, ServerState, read_endpoint
from shakedown.inference.metrics import watch_metrics
from shakedown.inference.server import ensure, in_use, start, status, stop
from tests.command import shakedown
from tests.faults.fake_engine import Engine
from tests.unit.local_engine import running

KEY = "a-key-of-the-team"


def order(engine: Engine | None, *, key_file: str = "", key_env: str = "") -> ServerOrder:
    url = f"http://127.0.0.1:{engine.server_port}/v1" if engine else "http://127.0.0.1:9"
    spec = LaunchSpec("org/model")
    return ServerOrder("policy", "external", spec, url=url, key_file=key_file, key_env=key_env)


def test_server_with_token_ids_is_used_by_the_protocol_that_it_speaks(tmp_path: Path) -> None:
    with running() as engine:
        start(order(engine), tmp_path)
        told = status(tmp_path)

    found = read_endpoint(tmp_path)
    assert found.engine == "sglang"
    assert found.base_url == f"http://127.0.0.1:{engine.server_port}"
    assert (found.model, found.served_name, found.pid) == ("org/model", "policy", 0)
    assert found.capabilities["prompt_logprobs"]
    # The stand-in lists no routes: weights are not said to be loadable.
    assert not found.capabilities["weight_update"]
    assert told.answers


def test_server_with_completions_alone_has_no_logprobs(tmp_path: Path) -> None:
    with running("plain") as engine:
        found = start(order(engine), tmp_path)

    assert found.engine == "external"
    assert not found.capabilities["logprobs"]


def test_external_server_is_neither_ended_nor_leased(tmp_path: Path) -> None:
    with running() as engine:
        start(order(engine), tmp_path)
        with in_use(tmp_path, lambda: order(None)) as found:
            assert found.external
        said = stop(tmp_path)
        still = status(tmp_path).answers

    assert "nothing was ended" in said
    assert still
    assert not ServerPaths(tmp_path).lease.exists()
    assert not ServerPaths(tmp_path).state.exists()


def test_record_of_an_own_server_before_does_not_speak_for_the_external_one(
    tmp_path: Path,
) -> None:
    ServerState("ended", "node", 4_000_000, reason="stopped on request").write(
        tmp_path / "state.json"
    )
    with running() as engine:
        start(order(engine), tmp_path)
        told = status(tmp_path)

    assert told.answers
    assert "external server" in told.sentence


def test_external_server_that_is_gone_is_told_and_not_started(tmp_path: Path) -> None:
    with running() as engine:
        start(order(engine), tmp_path)

    with pytest.raises(ServerError, match="cannot be started from here"):
        ensure(tmp_path, lambda: order(None))
    assert not status(tmp_path).alive


def test_key_comes_from_a_variable_or_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_KEY", KEY)
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(KEY)
    with running() as engine:
        engine.secret = KEY
        for place, given in (("a", ("TEAM_KEY", "")), ("b", ("", str(file)))):
            found = start(order(engine, key_env=given[0], key_file=given[1]), tmp_path / place)
            assert found.api_key() == KEY
            assert KEY not in (tmp_path / place / "endpoint.json").read_text()
        with pytest.raises(ServerError, match="401"):
            start(order(engine), tmp_path / "c")


def test_variable_that_is_not_set_is_bad_input(tmp_path: Path) -> None:
    assert "NO_SUCH_KEY" not in os.environ

    with pytest.raises(UsageError, match="NO_SUCH_KEY, which is not set"):
        attach(order(None, key_env="NO_SUCH_KEY"), ServerPaths(tmp_path), print)


@pytest.mark.parametrize(
    "url", ["", "10.0.0.7:8000", "ftp://a", "http://", "http://a:b", "http://me:key@a:8000"]
)
def test_what_is_no_url_is_bad_input_and_writes_nothing(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match=r"expected http://HOST:PORT"):
        attach(replace(order(None), url=url), ServerPaths(tmp_path), print)

    assert not list(tmp_path.iterdir())


def test_several_servers_are_one_endpoint_which_answers_while_one_of_them_does(
    tmp_path: Path,
) -> None:
    with running() as one:
        with running() as two:
            urls = [f"http://127.0.0.1:{engine.server_port}" for engine in (one, two)]
            several = replace(order(None), url=f"{urls[0]}/v1,{urls[1]}")
            found = start(several, tmp_path)
        left = status(tmp_path)
        asked = len(one.seen)
    gone = status(tmp_path)

    assert found.base_url == ",".join(urls)
    assert (found.engine, found.served_name) == ("sglang", "policy")
    assert left.answers
    assert asked == len(one.seen) > 0
    assert not gone.answers


def test_servers_that_are_not_alike_are_refused(tmp_path: Path) -> None:
    with running() as one, running("plain") as two:
        urls = ",".join(f"http://127.0.0.1:{engine.server_port}" for engine in (one, two))

        with pytest.raises(UsageError, match="are not alike"):
            attach(replace(order(None), url=urls), ServerPaths(tmp_path), print)


def test_a_server_that_does_not_answer_is_told_where_another_does(tmp_path: Path) -> None:
    said: list[str] = []
    with running() as one:
        several = f"http://127.0.0.1:{one.server_port},http://127.0.0.1:9"

        found = attach(replace(order(None), url=several), ServerPaths(tmp_path), said.append)

    assert found.base_url == several
    assert "http://127.0.0.1:9" in said[0]
    assert "it is used once it answers" in said[0]


def test_metrics_are_of_one_server(tmp_path: Path) -> None:
    with running() as one, running() as two:
        urls = ",".join(f"http://127.0.0.1:{engine.server_port}" for engine in (one, two))
        found = attach(replace(order(None), url=urls), ServerPaths(tmp_path), print)

    with pytest.raises(UsageError, match="several servers"):
        watch_metrics(found, 0.0)


def test_external_engine_is_never_launched() -> None:
    with pytest.raises(UsageError, match="never started here"):
        get_engine("external").launch(LaunchSpec("m"))


@pytest.mark.slow
def test_command_line_attaches_and_its_verdict_names_the_url(tmp_path: Path) -> None:
    with running() as engine:
        url = f"http://127.0.0.1:{engine.server_port}"
        done = shakedown("serve", "start", "--engine", "external", "--url", url, "--out", tmp_path)

    assert done.returncode == 0, done.stderr
    assert f"sglang serves policy at {url}" in done.stdout
