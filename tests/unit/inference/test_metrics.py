"""The engine's own counters: what they say, and the lease that they renew."""

import time
from pathlib import Path

import pytest

from shakedown.inference.engines import get_engine
from shakedown.inference.lease import LeaseWatch
from shakedown.inference.metrics import Metrics, RequestWatch, read_metrics
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


def test_replicas_are_added_and_the_fullest_cache_counts() -> None:
    found = Metrics.of(get_engine("vllm"), VLLM)

    assert found == Metrics(3.0, 5.0, 0.75, 14.0, None, 1500.0)


def test_sglang_tells_the_same_by_names_of_its_own() -> None:
    found = Metrics.of(get_engine("sglang"), SGLANG)

    assert found == Metrics(3.0, 0.0, 0.5, 7.0, 70.0, 700.0)


@pytest.mark.parametrize(
    "text",
    ["", "<html>", "vllm:num_requests_running{", "vllm:num_requests_running NaN", "\0" * 99],
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


def test_server_that_only_answers_keeps_its_lease_without_its_file(tmp_path: Path) -> None:
    uses = [True, True, False, False]
    watch = LeaseWatch(tmp_path / "lease", 0.1, asked=lambda: uses.pop(0))

    def later() -> bool:
        time.sleep(0.11)
        return watch.expired()

    assert [later() for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("lease", "looks"), [(0.2, 2), (3600.0, 0)])
def test_counters_are_looked_at_twice_in_a_lease_at_least(
    tmp_path: Path, lease: float, looks: int
) -> None:
    asked: list[bool] = []

    def ask() -> bool:
        asked.append(True)
        return False

    watch = LeaseWatch(tmp_path / "lease", lease, asked=ask)

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
