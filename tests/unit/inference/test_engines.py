"""Launch commands and the protocols' pure parts."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.errors import ServerError, UsageError
from shakedown.inference.engines import (
    ENGINES,
    GenerationRequest,
    LaunchSpec,
    Machine,
    Request,
    get_engine,
    get_token_engine,
)
from shakedown.inference.explain import likely_cause, log_end

SMALL = Machine(cores=2, cuda=False)
LARGE = Machine(cores=64, cuda=False)
GPUS = Machine(cores=64, cuda=True)
SPEC = LaunchSpec("org/model", served_name="policy", host="127.0.0.1", port=8000)


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize("name", sorted(set(ENGINES) - {"external"}))
def test_every_engine_listens_where_it_is_told(name: str) -> None:
    argv = get_engine(name).launch(SPEC, SMALL).argv

    assert (option(argv, "--host"), option(argv, "--port")) == ("127.0.0.1", "8000")
    assert "org/model" in argv


def test_transformers_takes_a_share_of_the_memory_that_is_the_cache_it_was_given() -> None:
    engine = get_engine("transformers")

    def share(gib: float, machine: Machine) -> float:
        argv = engine.launch(replace(SPEC, kv_cache_gb=gib), machine).argv
        return float(option(argv, "--cb-max-memory-percent"))

    machine = Machine(cores=2, cuda=False, memory=32.0)
    assert share(8.0, machine) == 0.25
    assert share(0.25, machine) == pytest.approx(1 / 32, abs=1e-4)
    assert share(1000.0, machine) == 0.8
    gpu = engine.launch(SPEC, Machine(cores=2, cuda=True, memory=32.0))
    assert "--cb-max-memory-percent" not in gpu.argv


def test_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'sglang'"):
        get_engine("sglan")


def test_engine_without_logprobs_is_refused_where_they_are_needed() -> None:
    with pytest.raises(UsageError, match="returns no logprobs"):
        get_token_engine("transformers")


def test_vllm_on_a_small_machine_saves_a_process_and_pins_nothing() -> None:
    small, large, gpu = (get_engine("vllm").launch(SPEC, m) for m in (SMALL, LARGE, GPUS))

    assert small.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in {**large.env, **gpu.env}
    assert "--enforce-eager" in small.argv
    assert "--enforce-eager" not in gpu.argv


def test_vllm_never_samples_by_the_models_own_defaults() -> None:
    assert option(get_engine("vllm").launch(SPEC, GPUS).argv, "--generation-config") == "vllm"


def test_cache_size_counts_in_gib() -> None:
    spec = dataclasses.replace(SPEC, kv_cache_gb=0.25)

    argv = get_engine("vllm").launch(spec, SMALL).argv

    assert option(argv, "--kv-cache-memory-bytes") == str(1 << 28)


def test_hub_is_left_alone_for_a_local_model_only(tmp_path: Path) -> None:
    local = dataclasses.replace(SPEC, model=str(tmp_path))

    assert get_engine("vllm").launch(local, SMALL).env["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in get_engine("vllm").launch(SPEC, SMALL).env


def test_allocation_becomes_parallel_sizes() -> None:
    vllm = dataclasses.replace(SPEC, allocation="vllm:d2t4p3")
    sglang = dataclasses.replace(SPEC, allocation="fsdp:d8+sglang:d2t4")

    argv = get_engine("vllm").launch(vllm, GPUS).argv
    other = get_engine("sglang").launch(sglang, GPUS).argv

    sizes = [option(argv, f"--{kind}-parallel-size") for kind in ("data", "tensor", "pipeline")]
    assert sizes == ["2", "4", "3"]
    assert (option(other, "--dp-size"), option(other, "--tp-size")) == ("2", "4")


def test_allocation_for_another_engine_is_an_error() -> None:
    spec = dataclasses.replace(SPEC, allocation="sglang:d1")

    with pytest.raises(UsageError, match="is for sglang, but the engine is vllm"):
        get_engine("vllm").launch(spec, SMALL)


def test_prefix_and_extra_arguments_stand_around_the_command() -> None:
    spec = dataclasses.replace(
        SPEC, prefix=("apptainer", "exec"), extra_args=("--max-num-seqs", "8")
    )

    argv = get_engine("vllm").launch(spec, SMALL).argv

    assert argv[:2] == ("apptainer", "exec")
    assert argv[-2:] == ("--max-num-seqs", "8")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("reply", [None, {}, [], {"choices": [{}]}, {"choices": 3}, "text"])
def test_reply_of_another_form_is_a_server_error(name: str, reply: Any) -> None:
    engine = get_token_engine(name)

    with pytest.raises(ServerError, match="answered without"):
        engine.parse_generation(reply)
    with pytest.raises(ServerError, match="answered without"):
        engine.parse_score(reply, [1, 2])


def test_vllm_samples_come_back_in_order_with_the_cached_tokens() -> None:
    row = {"text": "a", "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0]}}
    reply = {
        "choices": [{**row, "index": 1, "token_ids": [8]}, {**row, "index": 0, "token_ids": [7]}],
        "usage": {"prompt_tokens_details": {"cached_tokens": 128}},
    }

    found = get_token_engine("vllm").parse_generation(reply)

    assert [c.tokens for c in found] == [[7], [8]]
    assert found[0].cached_tokens == 128


def test_no_request_of_vllm_carries_a_seed() -> None:
    body = get_token_engine("vllm").generate("policy", GenerationRequest([1], 4)).body

    assert "seed" not in body


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        ({"results": [{"repacked": 1}, {"repacked": 1}]}, ""),
        ({"results": [{"repacked": 1}, {"error": "no such folder"}]}, "no such folder"),
        ({"results": [None]}, "did not say what they loaded"),
        (None, "did not say what they loaded"),
    ],
)
def test_weights_are_loaded_only_when_every_worker_says_so(reply: Any, fault: str) -> None:
    engine = get_token_engine("vllm")
    load, _ = engine.update_weights("/weights")

    found = engine.update_fault(load, reply)

    assert (fault in found) if fault else not found


def test_cache_that_was_not_reset_is_a_fault() -> None:
    engine = get_token_engine("vllm")
    _, reset = engine.update_weights("/weights")

    assert engine.update_fault(reset, {"success": True}) == ""
    assert "not reset" in engine.update_fault(reset, {"success": False})


def test_sglang_refusal_of_weights_is_a_fault() -> None:
    engine = get_token_engine("sglang")
    request = Request("/update_weights_from_disk")

    assert engine.update_fault(request, {"success": True, "message": "ok"}) == ""
    assert "shape" in engine.update_fault(request, {"success": False, "message": "bad shape"})


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("OSError: [Errno 98] Address already in use", "the port is in use"),
        ("torch.OutOfMemoryError: CUDA out of memory", "out of memory"),
        ("ValueError: ... is less than requested memory for kv (9 GiB)", "out of memory"),
        ("Repository Not Found for url", "the model is missing or incomplete"),
        ("error: unrecognized arguments: --foo", "the engine does not know an argument"),
        ("ModuleNotFoundError: No module named 'sglang'", "not installed"),
        ("User-specified max_model_len (99) is greater than the derived", "longer than the model"),
    ],
)
def test_log_names_the_cause(log: str, cause: str) -> None:
    found = likely_cause(f"INFO starting\n{log}\nINFO bye")

    assert found is not None
    assert cause in found.text
    assert found.remedy


def test_kill_without_a_word_suggests_memory_and_an_unknown_log_nothing() -> None:
    killed = likely_cause("INFO loading", -9)

    assert killed is not None
    assert "memory" in killed.text
    assert likely_cause("INFO loading", 1) is None


def test_end_of_a_log_is_short_and_has_no_empty_lines() -> None:
    text = "\n\n".join(f"line {number} {'x' * 1000}" for number in range(100))

    shown = log_end(text).splitlines()

    assert len(shown) == 15
    assert all(len(line) <= 240 for line in shown)
    assert shown[-1].startswith("line 99")
