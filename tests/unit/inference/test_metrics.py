"""The engine's own counters: what they say, and the idle time that they end."""

import contextlib
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shakedown.core.errors import ServerError
from shakedown.core.files import write_json
from shakedown.inference import metrics
from shakedown.inference.engines import LaunchSpec, get_engine
from shakedown.inference.folder import Endpoint, ServerOrder, read_endpoint
from shakedown.inference.idle_limit import IdleLimit
from shakedown.inference.metrics import (
    Metrics,
    RequestWatch,
    count_replicas,
    metrics_table,
    read_metrics,
    watch_metrics,
)
from shakedown.inference.server import start
from tests.faults.fake_engine import Engine
from tests.unit.local_engine import running

# Two replicas of vLLM 0.32, as its /metrics writes them.
VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 2.0
vllm:num_requests_running{engine="1",model_name="a } b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a } b"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="a } b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a } b"} 0.75
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a } b"} 10.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="a } b"} 4.0
vllm:request_success_created{engine="0",finished_reason="stop",model_name="a } b"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="a } b"} 1.5e+03 1732400000000
"""
SGLANG = """sglang:num_running_reqs{model_name="m"} 3
sglang:num_queue_reqs{model_name="m"} 0
sglang:token_usage{model_name="m"} 0.5
sglang:num_requests_total{model_name="m"} 7
sglang:prompt_tokens_total{model_name="m"} 70
sglang:generation_tokens_total{model_name="m"} 700
"""


@pytest.mark.parametrize(
    ("engine", "text", "count"),
    [
        ("vllm", VLLM, 2),
        (
            "sglang",
            'sglang:num_running_reqs{dp_rank="0"} 1\nsglang:num_running_reqs{dp_rank="3"} 1',
            2,
        ),
        ("sglang", 'sglang:num_running_reqs{model_name="m"} 1', 0),
        ("transformers", "shakedown:requests_running 1", 0),
    ],
)
def test_replicas_are_counted_by_what_their_engine_calls_them(
    engine: str, text: str, count: int
) -> None:
    assert count_replicas(get_engine(engine), text) == count


def test_replicas_are_added_and_the_fullest_cache_counts() -> None:
    found = Metrics.of(get_engine("vllm"), VLLM)

    assert found == Metrics(3.0, 5.0, 0.75, 14.0, None, 1500.0)


def test_sglang_tells_the_same_by_names_of_its_own() -> None:
    found = Metrics.of(get_engine("sglang"), SGLANG)

    assert found == Metrics(3.0, 0.0, 0.5, 7.0, 70.0, 700.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>",
        "vllm:num_requests_running{",
        "vllm:num_requests_running NaN",
        "a{" + "} " * 500_000,
    ],
)
def test_text_without_samples_tells_nothing(text: str) -> None:
    assert Metrics.of(get_engine("vllm"), text) == Metrics()


def test_request_between_two_looks_is_a_use_and_a_look_is_none() -> None:
    told = [Metrics(finished=3.0), Metrics(finished=3.0), None, Metrics(finished=4.0)]
    watch = RequestWatch(lambda: told.pop(0))

    assert [watch() for _ in range(4)] == [True, False, False, True]


def test_request_that_runs_for_long_is_a_use_at_every_look() -> None:
    watch = RequestWatch(lambda: Metrics(running=1.0, waiting=0.0, finished=3.0))

    assert [watch() for _ in range(3)] == [True, True, True]


def test_server_that_only_answers_is_not_idle_without_its_file(tmp_path: Path) -> None:
    uses = [True, True, False, False]
    watch = IdleLimit(tmp_path / "lease", 0.1, asked=lambda: uses.pop(0))

    def later() -> bool:
        time.sleep(0.11)
        return watch.reached()

    assert [later() for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("lease", "looks"), [(0.2, 2), (3600.0, 0)])
def test_counters_are_looked_at_twice_in_a_lease_at_least(
    tmp_path: Path, lease: float, looks: int
) -> None:
    asked: list[bool] = []

    def ask() -> bool:
        asked.append(True)
        return False

    watch = IdleLimit(tmp_path / "lease", lease, asked=ask)

    for _ in range(20):
        time.sleep(0.0105)
        watch.idle()

    assert len(asked) >= looks if looks else not asked


def test_counters_are_read_from_a_server_and_grow_with_its_answers() -> None:
    engine = get_engine("vllm")
    with running() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        before = read_metrics(engine, url, "")
        server.seen.append(("/v1/completions", {}))
        after = read_metrics(engine, url, "")

    assert before is not None
    assert after is not None
    assert (before.finished, after.finished) == (0.0, 1.0)
    assert after.used_since(before)


def test_server_that_is_not_there_tells_nothing() -> None:
    assert read_metrics(get_engine("vllm"), "http://127.0.0.1:9", "") is None


def endpoint(engine: Engine, root: Path) -> Endpoint:
    """The stand-in as if vLLM: it writes vLLM's names."""
    url = f"http://127.0.0.1:{engine.server_port}"
    found = start(ServerOrder("p", "external", LaunchSpec("org/m"), url=url), root)
    write_json(root / "endpoint.json", replace(found, engine="vllm").to_json())
    return read_endpoint(root)


def test_table_has_every_value_and_a_dash_for_what_is_not_told(tmp_path: Path) -> None:
    with running() as engine:
        engine.seen += [("/v1/completions", {})] * 1234
        told = watch_metrics(endpoint(engine, tmp_path), 0.01)

    assert told["running"] == 0.0
    assert told["generated_tokens_per_second"] is None
    lines = metrics_table({**told, "cache": 0.256}).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["running", "waiting", "cache", "finished"]
    assert lines[1].endswith(" -")
    assert lines[2].endswith(" 25.6%")
    assert "1,23" in lines[3]


def test_tokens_a_second_are_those_between_two_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [Metrics(generated_tokens=100.0), Metrics(generated_tokens=400.0)]
    clock = [0.0, 2.0]
    with running() as engine:
        found = endpoint(engine, tmp_path)
    monkeypatch.setattr(metrics, "read_metrics", lambda *_: looks.pop(0))
    monkeypatch.setattr(time, "monotonic", lambda: clock.pop(0))
    monkeypatch.setattr(time, "sleep", lambda _: None)

    assert watch_metrics(found, 2.0)["generated_tokens_per_second"] == 150.0


def test_server_without_metrics_cannot_be_shown(tmp_path: Path) -> None:
    with running() as engine:
        found = replace(endpoint(engine, tmp_path), engine="external")

    with pytest.raises(ServerError, match="reports no metrics"):
        watch_metrics(found, 0.01)


def test_a_server_that_never_stops_answering_tells_nothing() -> None:
    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"#" * 65536)

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"

        assert read_metrics(get_engine("vllm"), url, "", timeout=30.0) is None
        server.shutdown()
