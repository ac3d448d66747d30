"""Which workers and steps are profiled. The tables hold what NeMo RL's own tests expect
(tests/unit/utils/test_nsys.py and tests/unit/distributed/test_worker_groups.py there)."""

import json
from pathlib import Path

import pytest

from shakedown.config import Config, ProfileConfig, load_config
from shakedown.core.errors import ConfigError, UsageError
from shakedown.profiling.capture import Order, matching
from shakedown.profiling.launch import (
    EXTRA_OPTIONS,
    PATTERNS,
    STEPS,
    nsys_command,
    nsys_options,
    order_of,
    requested,
)

SHIPPED = Path(__file__).parents[3] / "config" / "config.yaml"


def _asked(workers: str, steps: str) -> ProfileConfig:
    found = requested({PATTERNS: workers, STEPS: steps})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("patterns", "worker", "pattern"),
    [
        ("*critic*,*inference*", "dtensor_policy_worker", ""),
        ("*policy*,*critic*", "dtensor_policy_worker", "*policy*"),
        ("exact-worker,another-worker", "exact-worker", "exact-worker"),
        ("*vllm*,*policy*,*critic*", "vllm_inference_worker", "*vllm*"),
        ("  *train*  ,  exact-name  ,  *test*  ", "training_worker", "*train*"),
        ("  *train*  ,  exact-name  ,  *test*  ", "exact-name", "exact-name"),
        ("  *train*  ,  exact-name  ,  *test*  ", "some_test_worker", "*test*"),
        ("  *train*  ,  exact-name  ,  *test*  ", "no_match", ""),
        ("*policy*,,*critic*,", "policy_worker", "*policy*"),
        ("*policy*,,*critic*,", "critic_worker", "*critic*"),
        ("*policy*,,*critic*,", "other_worker", ""),
        ("trainer-rank[13]", "trainer-rank3", "trainer-rank[13]"),
        ("trainer-rank[!0]", "trainer-rank0", ""),
        ("trainer-rank?", "trainer-rank10", ""),
    ],
)
def test_the_first_pattern_that_matches_the_name_counts(
    patterns: str, worker: str, pattern: str
) -> None:
    assert matching(_asked(patterns, "1:5").patterns, [worker]) == pattern


@pytest.mark.parametrize(
    ("steps", "bounds"),
    [
        ("5:10", (5, 10)),
        (" 5:10 ", (5, 10)),
        ("5:6", (5, 6)),
        ("1000000:1000002", (1000000, 1000002)),
        ("all", (1, None)),
    ],
)
def test_steps_count_from_1_and_the_last_of_a_range_is_left_out(
    steps: str, bounds: tuple[int, int | None]
) -> None:
    assert _asked("worker*", steps).bounds == bounds


@pytest.mark.parametrize(
    "steps", ["1-10", "abc:10", "1:xyz", "10:5", "5:5", "0:10", "-5:10", "3", "1:2:3", "٣:٥"]
)
def test_a_range_that_is_none_is_refused_by_the_name_of_its_variable(steps: str) -> None:
    with pytest.raises(UsageError, match=f"{STEPS}.*expected start:stop with 1 <= start < stop"):
        _asked("worker*", steps)


@pytest.mark.parametrize("given", [{PATTERNS: "worker*"}, {STEPS: "1:10"}], ids=str)
def test_one_variable_without_the_other_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="a profile needs both"):
        requested(given)


def test_patterns_that_name_no_worker_are_refused() -> None:
    with pytest.raises(UsageError, match=f"{PATTERNS}.*names none"):
        _asked(" , ", "1:2")


def test_the_environment_wins_over_the_config_and_without_either_nothing_is_profiled() -> None:
    config = ProfileConfig(workers="*vllm*", steps="7:9")

    assert requested({}, None) is None
    assert requested({}, config) is config
    found = requested({PATTERNS: "*policy*", STEPS: "3:5"}, config)
    assert found == ProfileConfig(workers="*policy*", steps="3:5")


def _overlaid(folder: Path, profile: str) -> Config:
    overlay = folder / "overlay.yaml"
    overlay.write_text(f"stages: {{sft: {{profile: {profile}}}}}", encoding="utf-8")
    return load_config(SHIPPED, overlay)


def test_a_range_without_quotes_which_yaml_reads_as_a_number_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps.*got 185; .*3:5 as 3 x 60 \+ 5\): put it in qu"):
        _overlaid(tmp_path, "{workers: '*', steps: 3:5}")


def test_a_key_of_the_stage_asks_for_a_profile(tmp_path: Path) -> None:
    config = _overlaid(tmp_path, "{workers: '*policy*', steps: '3:5'}")

    assert config.own_stages["sft"].profile == ProfileConfig(workers="*policy*", steps="3:5")
    assert config.own_stages["grpo"].profile is None


def _order(steps: str = "3:5") -> Order:
    asked = ProfileConfig(workers="*", steps=steps)
    made = order_of(asked, worker="vllm_generation_worker", component="inference", target=Path("p"))
    return Order(**{**vars(made), "scratch": "/scratch", "nsys": True})


def test_nsys_gets_the_options_of_nemo_rl_and_writes_to_the_scratch_folder() -> None:
    assert nsys_command("/opt/nsys", _order(), {}) == [
        "/opt/nsys",
        "profile",
        "-t",
        "cuda,nvtx",
        "-o",
        "/scratch/vllm_generation_worker_3:5_%p",
        "-s",
        "none",
        "--stop-on-exit=true",
        "--cuda-graph-trace=node",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
    ]


def test_nsys_records_the_whole_run_where_all_steps_are_asked_for() -> None:
    command = nsys_command("nsys", _order("all"), {})

    assert not [word for word in command if "capture-range" in word]
    assert "/scratch/vllm_generation_worker_all_%p" in command


def test_options_of_the_user_win() -> None:
    given = {"gpu-metrics-device": "all", "cuda-memory-usage": True, "t": "cuda"}

    extra = nsys_options({EXTRA_OPTIONS: json.dumps(given)})
    command = nsys_command("nsys", _order(), extra)

    assert command[2:4] == ["-t", "cuda"]
    assert {"--gpu-metrics-device=all", "--cuda-memory-usage=true"} <= set(command)


@pytest.mark.parametrize("text", ["{not json", "[1, 2]", '"text"', '{"a": [1]}', "[" * 100_000])
def test_options_that_are_no_object_are_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(UsageError, match=EXTRA_OPTIONS):
        requested({PATTERNS: "*", STEPS: "1:2", EXTRA_OPTIONS: text})
