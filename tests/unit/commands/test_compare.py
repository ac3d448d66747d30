"""`shakedown compare` from end to end: a real model in transformers, a local server in the dialect.

The server speaks vLLM's protocol and takes its numbers from the same model, so that each trap can
be planted exactly; the real engine is compared in test_agents_consistency_vllm.py.
"""

import json
import math
import re
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from shakedown.cli import main
from shakedown.consistency.factors import FACTORS
from shakedown.consistency.factors.table import Row, named
from shakedown.consistency.plan import Plan
from shakedown.consistency.run import Comparison, compare
from shakedown.consistency.samples import EncodedPrompt, Scored, read_prompts
from shakedown.consistency.score import Reference
from shakedown.consistency.tables import open_tables
from shakedown.consistency.write import make_verdict
from shakedown.core.errors import BlockedError, UsageError
from shakedown.core.verdict import Stopwatch, read_verdict
from shakedown.report.comparison_page import render_report
from shakedown.report.comparison_tables import sample_lines, token_lines
from shakedown.training.demo import write_model

pytestmark = pytest.mark.slow  # each comparison has a server and loads a model

ROWS = [
    {"messages": [{"role": "user", "content": f"{n:02d}+{n + 1:02d}="}], "answer": "1"}
    for n in range(10)
]

_STALE = 0.3  # nats that a planted stale prefix cache moves every decoded token by


@dataclass
class Engine:
    """What the server does; `plant` holds the traps that are on."""

    reference: Reference
    url: str = ""
    owner: str = "vllm"
    plant: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    seen: int = 0
    told: int = 0

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, object]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "owned_by": self.owner}]}
        with self.lock:
            self.seen += 1
            if body.get("echo") and "no_echo" in self.plant:
                return 403, {"error": {"message": "no echo here"}}
            if "refuse" in self.plant or ("refuse_some" in self.plant and self.seen % 5 == 0):
                return 400, {"error": {"message": "as planted"}}
            if path == "/generate":
                return 200, self.native(body)
            if "prompt_logprobs" in body:
                return 200, self.scored(body["prompt"])
            return 200, self.generated(path, body)

    def generated(self, path: str, body: dict[str, Any]) -> object:
        if body.get("echo"):
            # The other tokenizer's ids are ours moved by one.
            moved = int("other_tokenizer" in self.plant)
            ids = [body["prompt"][0], *(i - moved for i in body["prompt"][1:])]
            return {"choices": [{"text": self.reference.tokenizer.decode(ids)}]}
        if "logprob_token_ids" in body:
            return self.next_token(body)
        prompt = self.prompt(body)
        ids, logprobs = self.sample(prompt, body["max_tokens"], body["temperature"])
        rows = self.planted(logprobs)
        chosen: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": ids}
        if path.endswith("chat/completions"):
            chosen |= {"message": {"content": "x"}}
            chosen |= {"logprobs": {"content": [{"logprob": value} for value in rows]}}
        else:
            chosen |= {"text": "x", "logprobs": {"token_logprobs": rows}}
        if "no_logprobs" in self.plant:
            chosen["logprobs"] = None
        if "no_ids" in self.plant:
            del chosen["token_ids"]
        return {"choices": [chosen], "prompt_token_ids": prompt, "usage": {}}

    def next_token(self, body: dict[str, Any]) -> object:
        """vLLM's `logprob_token_ids`; under a cache salt nothing comes from the cache."""
        (token,) = body["logprob_token_ids"]
        (value,) = self.values(body["prompt"], [token])
        cached = 0
        if "stale_cache" in self.plant and "cache_salt" not in body:
            value, cached = value - _STALE, 5
        top = {f"token_id:{token}": value}
        return {
            "choices": [{"logprobs": {"top_logprobs": [top]}}],
            "usage": {"prompt_tokens_details": {"cached_tokens": cached}},
        }

    def prompt(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            text = "".join(m["content"] for m in body["messages"])
            prompt = [1, *self.reference.tokenizer(text, add_special_tokens=False)["input_ids"]]
        else:
            prompt = list(self.reference.tokenizer(body["prompt"])["input_ids"])
        if "double_bos" in self.plant:
            prompt = [1, *prompt]
        if "other_template" in self.plant:
            prompt = [*prompt, *prompt[-2:]]
        if "other_tokenizer" in self.plant:
            prompt = [prompt[0], *(i + 1 for i in prompt[1:])]
        return prompt

    def planted(self, logprobs: list[float]) -> list[float | None]:
        rows: list[float | None] = list(logprobs)
        if "missing" in self.plant:
            rows[0] = None
        if "impossible" in self.plant:
            rows[1:4] = [0.7, math.nan, -math.inf]
        if "all_above" in self.plant:
            rows = [0.7] * len(rows)
        return rows

    def native(self, body: dict[str, Any]) -> object:
        """SGLang's /generate: [logprob, token id, text] a token."""
        ids = body["input_ids"]
        options = body["sampling_params"]
        if "logprob_start_len" in body:
            known = self.values(ids[:1], ids[1:])
            rows = [[v, i, None] for v, i in zip([None, *known], ids, strict=True)]
            return {
                "text": "",
                "meta_info": {"input_token_logprobs": rows, "output_token_logprobs": []},
            }
        made, values = self.sample(ids, options["max_new_tokens"], options["temperature"])
        rows = [[v, i, None] for v, i in zip(values, made, strict=True)]
        return {"text": "x", "meta_info": {"output_token_logprobs": rows, "finish_reason": None}}

    def scored(self, ids: Sequence[int]) -> object:
        values = self.values(ids[:1], ids[1:])
        if "updated_later" in self.plant and self.seen > 3 * len(ROWS):
            values = [value - 0.5 for value in values]
        if "wavers" in self.plant:
            values = self.waver(values)
        rows = [None, *({str(i): {"logprob": v}} for i, v in zip(ids[1:], values, strict=True))]
        return {"choices": [{"prompt_logprobs": rows}]}

    def waver(self, values: list[float]) -> list[float]:
        """Another answer each time, by a thousandth of a nat."""
        self.told += 1
        return list(values + np.random.default_rng(self.told).normal(0, 1e-3, len(values)))

    def values(
        self, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1
    ) -> list[float]:
        (score,) = self.reference.score([Scored(prompt, ids)], temperature=temperature)
        chosen = score.logprobs if "processed" in self.plant else score.raw
        return [float(value) for value in chosen]

    def sample(
        self, prompt: Sequence[int], count: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        """Draw `count` tokens, the most likely ones at temperature 0."""
        ids: list[int] = []
        generator = np.random.default_rng([len(prompt), *prompt])
        for _ in range(count):
            logits = self.logits([*prompt, *ids])
            if temperature == 0:
                place = 1 if "wrong_greedy" in self.plant and len(ids) == 2 else 0
                ids.append(int(np.argsort(-logits)[place]))
            else:
                p = np.exp(logits / temperature - np.max(logits / temperature))
                ids.append(int(generator.choice(len(p), p=p / p.sum())))
        values = self.values(prompt, ids, temperature)
        if "stale_cache" in self.plant:
            values = [value - _STALE for value in values]
        if "wavers" in self.plant:
            values = self.waver(values)
        if "outlier" in self.plant and temperature and prompt[1] == prompt[2]:
            values[1] -= 5.0
        return ids, values

    def logits(self, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        with torch.inference_mode():
            out = self.reference._model(input_ids=torch.tensor([list(ids)])).logits
        return out[0, -1].double().numpy()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Engine]:
    engine = Engine(Reference(str(model), dtype="float32"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def answer(self, body: dict[str, Any]) -> None:
            status, reply = engine.reply(self.path, body)
            if "dies" in engine.plant and engine.seen > 13:
                self.close_connection = True  # without a word, as a process that was killed
                return
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Quiet."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # Python's 5 make a client of many connections wait for seconds

    listening = Server(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    engine.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield engine
    listening.shutdown()
    listening.server_close()
    thread.join()


@pytest.fixture
def engine(server: Engine) -> Engine:
    server.plant, server.owner, server.seen = set(), "vllm", 0
    return server


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def run(engine: Engine, model: Path, data: Path, out: Path, *options: str) -> int:
    argv = ["compare", "--reference", f"transformers:{model}", "--engine", engine.url]
    argv += ["--data", str(data), "--out", str(out), "--max-tokens", "8", *options]
    return main(argv)


def compared(engine: Engine, model: Path, **options: Any) -> Comparison:
    plan = Plan(url=engine.url, reference=str(model), rows=ROWS, max_tokens=8, **options)
    return compared_by(plan)


def compared_by(plan: Plan) -> Comparison:
    with tempfile.TemporaryDirectory() as out:
        return compare(plan, Path(out))


def culprit_of(result: Comparison) -> list[str]:
    """The factor that is named, if one is."""
    row = named(result.explained.rows)
    return [row.factor] if row else []


def rows_of(result: Comparison) -> dict[str, Row]:
    return {row.factor: row for row in result.explained.rows}


def sharpened(folder: Path) -> Path:
    """Another checkpoint, sure of its tokens."""
    write_model(folder, seed=1)
    return edited(folder, folder, lambda model: model.model.norm.weight.mul_(3))


def scaled_layer(source: Path, folder: Path, factor: float) -> Path:
    """A copy with a matrix of its second layer multiplied."""

    def scale(model: Any) -> None:
        model.model.layers[1].self_attn.o_proj.weight.mul_(factor)

    return edited(source, folder, scale)


def edited(source: Path, folder: Path, change: Callable[[Any], object]) -> Path:
    if source != folder:
        shutil.copytree(source, folder)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return folder


def test_an_engine_that_agrees_passes_and_writes_every_file(
    engine: Engine, model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(engine, model, data, out, "--limit", "4") == 0
    verdict = read_verdict(out / "verdict.json")
    tokens = pq.read_table(out / "tokens.parquet").to_pydict()
    samples = pq.read_table(out / "samples.parquet").to_pydict()
    assert verdict.status == "PASS"
    assert len(tokens["token"]) == verdict.metrics["tokens"] == 4 * 8
    assert samples["sample"] == [0, 1, 2, 3]
    assert samples["token_ids"][2] == tokens["token"][16:24]
    assert tokens["position"][8:10] == [0, 1]
    gaps = np.abs(np.subtract(tokens["logprob_reference"], tokens["logprob_engine"]))
    assert verdict.metrics["mean_abs_dlogp"] == pytest.approx(gaps.mean())
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Rollout consistency" in page
    assert "<script" not in page
    assert "http://" not in page.replace(engine.url, "")  # opens without a network


def test_tables_hold_whole_numbers_and_nulls_where_something_is_missing(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    engine.plant = {"missing", "wrong_greedy"}
    result = compared(engine, model)
    silent = [replace(each, greedy=None, divergence=None) for each in result.shown[5:]]
    with open_tables(tmp_path, lambda _: "\ud800") as tables:
        tables.add(result.shown[:5])
        tables.add(silent)
        tables.add([])
    tokens = pq.read_table(tmp_path / "tokens.parquet")
    samples = pq.read_table(tmp_path / "samples.parquet")
    assert tokens["logprob_engine"].null_count == len(ROWS)
    assert tokens["token"].to_pylist() == [
        i for each in result.shown for i in each.completion.token_ids
    ]
    assert set(tokens["text"].to_pylist()) == {"?"}
    assert pq.ParquetFile(tmp_path / "tokens.parquet").num_row_groups == 2  # one a part
    assert samples["greedy_first_divergence"].to_pylist() == [2] * 5 + [None] * 5
    assert samples["greedy_token_ids"].to_pylist()[5:] == [[]] * 5


def test_metrics_stand_with_their_interval(engine: Engine, model: Path) -> None:
    result = compared(engine, model)
    verdict = make_verdict(result, Stopwatch())
    for name in ("k3", "k1", "pearson", "ess", "greedy_divergence_rate", "chi2"):
        assert {name, f"{name}_low", f"{name}_high"} <= set(verdict.metrics)


def test_plain_prompts_are_compared_too(engine: Engine, model: Path) -> None:
    plan = Plan(engine.url, str(model), [{"prompt": "12+34="}, {"question": "1+1="}], max_tokens=4)
    result = compared_by(plan)
    assert result.status == "PASS"
    assert list(result.shown[0].completion.prompt.ids) == list(
        result.shown[0].completion.prompt_ids
    )


def test_sglang_s_own_protocol_is_compared_too(engine: Engine, model: Path) -> None:
    engine.owner = "sglang"
    result = compared(engine, model)
    assert (result.engine, result.status) == ("sglang", "PASS")
    assert all(each.prefill is not None for each in result.shown)
    rows = rows_of(compared(engine, model, factors="all"))
    assert rows["prefix_cache"].note == "not measured: sglang takes no cache salt, for a cold pass"
    assert rows["prompt_ids"].note.startswith("not measured: prompts went out as ids")
    assert rows["engine_batch"].distance == pytest.approx(0, abs=1e-5)


def test_raw_log_probabilities_at_another_temperature_fail_by_their_name(
    engine: Engine, model: Path
) -> None:
    result = compared(engine, model, temperature=0.5)
    assert result.status == "FAIL"
    assert culprit_of(result) == ["temperature"]
    engine.plant = {"processed"}
    assert compared(engine, model, temperature=0.5).status == "PASS"


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        ({"double_bos"}, ("special tokens", "<bos><bos>00+01=")),
        ({"other_template"}, ("template", "<bos>00+01=1=")),
        ({"other_tokenizer"}, ("tokenizer", "<bos>00+01=")),
        # Without the server's word its ids are read by the trainer's tokenizer.
        ({"other_template", "no_echo"}, ("template", "<bos>00+01=1=")),
    ],
)
def test_other_prompt_ids_in_the_server_stop_the_comparison_by_their_cause(
    engine: Engine, model: Path, data: Path, plant: set[str], told: tuple[str, str]
) -> None:
    engine.plant = plant
    out = data.parent / "out"

    assert run(engine, model, data, out) == 1

    verdict = read_verdict(out / "verdict.json")
    assert verdict.status == "FAIL"
    assert [f.check for f in verdict.findings] == ["prompt_ids"]  # no forest of other findings
    assert verdict.summary.startswith("10 of 10 prompts are other token ids")
    body = verdict.extra["prompt_ids"]
    assert (body["kind"], body["server_text"]) == told
    assert body["trainer_text"] == "<bos>00+01="
    assert body["trainer_ids"] != body["server_ids"]
    assert "first difference at id" in str(verdict.findings[0].measured)
    assert not (out / "tokens.parquet").exists()


def test_other_weights_than_the_server_tells_fail_and_no_factor_is_named(
    engine: Engine, tmp_path: Path, model: Path
) -> None:
    other = sharpened(tmp_path / "other")
    result = compared(engine, other)
    assert result.status == "FAIL"
    assert culprit_of(result) == []
    assert "no measured factor explains it" in result.summary
    assert "decisive" in {f.check: str(f.measured) for f in result.findings}["greedy_divergence"]


def test_other_weights_are_named_when_the_server_tells_its_folder(
    engine: Engine, tmp_path: Path, model: Path
) -> None:
    result = compared(engine, sharpened(tmp_path / "other"), engine_weights=str(model))
    assert (result.status, culprit_of(result)) == ("FAIL", ["weights"])
    row = rows_of(result)["weights"]
    assert row.left is not None
    assert row.left < 1e-4  # with the server's weights both sides agree
    assert "largest factor: weights" in result.summary
    assert make_verdict(result, Stopwatch()).next.startswith("give the reference the checkpoint")


def test_a_stale_prefix_cache_fails_by_its_name(engine: Engine, model: Path) -> None:
    engine.plant = {"stale_cache"}
    result = compared(engine, model)
    finding = {f.check: f for f in result.findings}["factor_prefix_cache"]
    assert (result.status, finding.status) == ("FAIL", "fail")
    assert "reset_prefix_cache" in finding.remedy
    row = rows_of(result)["prefix_cache"]
    assert row.distance == pytest.approx(_STALE, abs=1e-4)
    assert row.share == pytest.approx(1, abs=1e-3)
    # Decode against prefill explains as much, and is the more general of the two.
    assert rows_of(result)["decode_prefill"].share == pytest.approx(1, abs=1e-3)
    assert culprit_of(result) == ["prefix_cache"]


def test_deep_factors_are_measured_only_where_something_is_wrong_or_they_are_asked_for(
    engine: Engine, model: Path
) -> None:
    cheap = {"prompt_ids", "weights_in_run", "prefix_cache", "decode_prefill"}
    assert set(rows_of(compared(engine, model))) == cheap
    every = rows_of(compared(engine, model, factors="all"))
    assert set(every) == set(FACTORS)
    for name in ("precision", "attention", "packing", "reference_batch", "engine_batch"):
        assert every[name].distance is not None, name
    for name in ("trainer", "tensor_parallel", "prefix_cache", "weights"):
        assert every[name].distance is None, name
        assert every[name].note.startswith("not measured: "), name
    for name in ("prompt_ids", "temperature"):
        assert every[name].distance is None, name
        assert "same" in every[name].note, name


def test_an_engine_that_wavers_is_held_to_its_own_noise(engine: Engine, model: Path) -> None:
    engine.plant = {"wavers"}
    result = compared(engine, model, engine_dtype="float32", factors="all")
    # Two draws of a normal distribution are apart by 2 sigma / sqrt(pi) in the mean.
    floor = max(row.distance or 0.0 for row in result.explained.noise)
    assert floor == pytest.approx(2e-3 / math.sqrt(math.pi), rel=0.3)
    assert result.explained.chosen.limits["mean_abs_dlogp"].good == pytest.approx(4 * floor)
    assert result.status == "PASS"
    # As large as the noise by which it is measured, within a few percent.
    assert rows_of(result)["weights_in_run"].distance == pytest.approx(floor, rel=0.4)
    assert not [f for f in result.findings if f.check.startswith("factor_")]


def test_an_outlier_s_place_stands_in_the_summary(engine: Engine, model: Path) -> None:
    engine.plant = {"outlier"}
    result = compared(engine, model)
    assert (result.status, culprit_of(result)) == ("FAIL", ["decode_prefill"])
    # Prompts whose first two digits are alike; only "00+01=" is one.
    assert "largest 5 (sample 0 position 1)" in result.summary


def test_weights_that_change_during_the_comparison_fail_by_their_name(
    engine: Engine, model: Path
) -> None:
    engine.plant = {"updated_later"}
    result = compared(engine, model)
    finding = {f.check: f for f in result.findings}["factor_weights_in_run"]
    assert (result.status, finding.status) == ("FAIL", "fail")
    assert rows_of(result)["weights_in_run"].distance == pytest.approx(0.5, abs=1e-6)


def test_both_sides_in_float32_are_held_to_small_limits(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    """One matrix 5 % off passes the limits of dense models and fails those of float32."""
    other = scaled_layer(model, tmp_path / "other", 1.05)

    assert compared(engine, other, grade="dense").status == "PASS"
    result = compared(engine, other, engine_dtype="float32")

    assert result.status == "FAIL"
    assert "no measured factor explains it" in result.summary
    assert "float32 on both sides" in result.explained.chosen.source
    assert compared(engine, model, engine_dtype="float32").status == "PASS"


def test_another_number_format_is_a_warning_of_its_own(engine: Engine, model: Path) -> None:
    result = compared(engine, model, dtype="bfloat16", engine_dtype="float32")
    finding = {f.check: f for f in result.findings}["factor_precision"]
    assert (result.status, finding.status) == ("WARN", "warn")
    assert culprit_of(result) == ["precision"]
    assert rows_of(result)["precision"].share == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
def test_the_trainer_s_own_forward_is_a_factor(
    engine: Engine, model: Path, data: Path, trainer: str
) -> None:
    out = data.parent / "out"

    assert run(engine, model, data, out, "--trainer", trainer, "--factors", "all") == 0

    rows = {row["factor"]: row for row in read_verdict(out / "verdict.json").extra["factors"]}
    assert rows["trainer"]["b"] == trainer
    assert 0 <= rows["trainer"]["distance"] < 1e-4
    assert rows["trainer"]["tokens"] == 80


def test_a_greedy_token_that_is_not_the_argmax_is_seen(engine: Engine, model: Path) -> None:
    engine.plant = {"wrong_greedy"}
    result = compared(engine, model)
    assert result.metrics["greedy_divergence_rate"].value == 1.0
    assert {d.position for d in result.divergences if d} == {2}
    assert "the log-probabilities agree" in result.summary
    assert "greedy_divergence: 10 of 10 diverge" in result.summary


def test_missing_log_probabilities_are_told(engine: Engine, model: Path) -> None:
    engine.plant = {"missing"}
    result = compared(engine, model)
    finding = {f.check: f for f in result.findings}["missing_logprobs"]
    assert result.status == "WARN"
    # One in each sampled and each greedy completion.
    assert str(finding.measured).startswith("20 tokens")
    assert "sample 0 position 0; sample 1 position 0;" in str(finding.measured)


def test_impossible_log_probabilities_fail_by_name_and_are_never_averaged(
    engine: Engine, model: Path
) -> None:
    good = compared(engine, model)
    engine.plant = {"impossible"}
    result = compared(engine, model)
    finding = {f.check: f for f in result.findings}["bad_logprobs"]
    assert (result.status, finding.status) == ("FAIL", "fail")
    for told in ("position 1: 0.7, above 0", "position 2: NaN", "position 3: infinite"):
        assert f"sample 0 {told}" in str(finding.measured)
    # The good tokens of the same answers are all there, and only they.
    assert len(result.aligned.t) == len(good.aligned.t) - 3 * len(ROWS)
    assert not {1, 2, 3} & set(result.aligned.position.tolist())
    assert result.metrics["max_abs_dlogp"].value < 1e-3


def test_single_refused_requests_are_told_and_the_rest_is_compared(
    engine: Engine, model: Path
) -> None:
    engine.plant = {"refuse_some"}
    result = compared(engine, model)
    assert 0 < result.samples < len(ROWS)
    assert "as planted" in {f.check: str(f.measured) for f in result.findings}["requests"]


def test_a_server_that_dies_leaves_what_was_done_and_the_same_command_goes_on(
    engine: Engine, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shakedown.inference.client._RETRY_SECONDS", ())
    out, whole = data.parent / "out", data.parent / "whole"
    assert run(engine, model, data, whole, "--concurrency", "1") == 0
    engine.plant, engine.seen = {"dies"}, 0

    assert run(engine, model, data, out, "--concurrency", "1") == 3

    verdict = read_verdict(out / "verdict.json")
    assert verdict.status == "BLOCKED"
    assert "3 of 10 samples are done and 10 sampled" in verdict.summary
    again = verdict.next.partition("go on: ")[2]
    assert not (out / "tokens.parquet").exists()

    engine.plant, engine.seen = set(), 0
    assert main(shlex.split(again)[1:]) == 0

    # 7 greedy completions and 10 scores by prefill were left to ask for; noise and prefix cache
    # are measured anew: three passes of 10, and 80 tokens, none of which comes from the cache.
    assert engine.seen == 17 + 30 + 80
    assert not (out / "parts").exists()
    for name in ("tokens.parquet", "samples.parquet"):
        assert pq.read_table(out / name).equals(pq.read_table(whole / name))
    metrics = [read_verdict(folder / "verdict.json").metrics for folder in (out, whole)]
    assert metrics[0]["k3"] == metrics[1]["k3"]


REWARD = """
def even(completion: str, answer: str) -> float:
    assert answer == "1"
    return float(sum(map(ord, completion)) % 2 == 0)
"""


def test_both_sides_answers_are_judged_by_a_reward(
    engine: Engine, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data.parent / "mine.py").write_text(REWARD, encoding="utf-8")
    out = data.parent / "out"
    reward = ["--reward", f"{data.parent / 'mine.py'}:even"]

    assert run(engine, model, data, out, *reward, "--compat", "cmp_rollout") == 0

    metrics = read_verdict(out / "verdict.json").metrics
    lines = capsys.readouterr().out.splitlines()
    # Both sides' greedy completions are the same tokens: the same model makes them.
    right = metrics["accuracy_greedy_engine"]
    assert 0 < right < 1
    assert metrics["accuracy_greedy_reference"] == right
    assert (metrics["accuracy_greedy_rows"], metrics["accuracy_greedy_p"]) == (10, 1.0)
    assert metrics["accuracy_sampled_rows"] == 10
    assert lines[-2:] == [
        f"Transformers accuracy: {right * 100:.2f}%",
        f"vLLM         accuracy: {right * 100:.2f}%",
    ]
    assert "<h2>Answers</h2>" in (out / "report.html").read_text(encoding="utf-8")


def test_a_reward_that_fails_counts_as_wrong_and_is_told(
    engine: Engine, model: Path, data: Path
) -> None:
    (data.parent / "mine.py").write_text("def none(a, b):\n    return 1 / 0\n", encoding="utf-8")
    out = data.parent / "out"

    assert run(engine, model, data, out, "--reward", f"{data.parent / 'mine.py'}:none") == 0

    verdict = read_verdict(out / "verdict.json")
    finding = {f.check: f for f in verdict.findings}["accuracy_greedy"]
    assert (verdict.status, verdict.metrics["accuracy_greedy_engine"]) == ("WARN", 0.0)
    assert "20 rewards failed and count as wrong" in str(finding.measured)


@pytest.mark.parametrize(
    ("options", "row", "said"),
    [
        (["--reward", "exact_mach"], {"answer": "1"}, "did you mean 'exact_match'"),
        (["--reward", "exact_match"], {}, "no row of the data has an `answer`"),
        (["--reward", "mine.py:x"], {"answer": "1"}, "mine.py"),
        (["--compat", "cmp_rollout"], {"answer": "1"}, "it needs --reward"),
    ],
)
def test_a_reward_that_cannot_be_used_is_told_before_anything_is_loaded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    row: dict[str, str],
    said: str,
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", **row}) + "\n", encoding="utf-8")
    # Neither the model nor the server exists.
    argv = ["compare", "--reference", "transformers:./none", "--engine", "http://127.0.0.1:9"]

    assert main([*argv, "--data", str(rows), "--out", str(tmp_path / "out"), *options]) == 2

    assert said in capsys.readouterr().err


@pytest.mark.parametrize("tokens_at_once", [1 << 15, 20, 1])
def test_the_reference_completes_as_the_engine_does_whatever_stands_beside_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tokens_at_once: int
) -> None:
    monkeypatch.setattr("shakedown.consistency.score._GENERATED", tokens_at_once)
    prompts = [[1, 4, 5, 6, 7, 8], [1, 9], [1, 3, 3, 10]]

    made = engine.reference.generate(
        [EncodedPrompt(0, ids=ids) for ids in prompts], max_tokens=6, temperature=0.0, seed=0
    )

    ends = engine.reference._ends
    for prompt, ids in zip(prompts, made, strict=True):
        expected, _ = engine.sample(prompt, 6, 0.0)
        assert ids == expected[: len(ids)]
        assert len(ids) == 6 or ids[-1] in ends


def test_the_reference_samples_from_all_tokens_by_its_seed_alone(engine: Engine) -> None:
    def drawn(seed: int) -> list[list[int]]:
        prompts = [EncodedPrompt(0, ids=[1, 4])] * 40
        return engine.reference.generate(prompts, max_tokens=8, temperature=5.0, seed=seed)

    before = torch.random.get_rng_state()
    assert drawn(1) == drawn(1) != drawn(2)
    assert torch.equal(before, torch.random.get_rng_state())
    # Near uniform at this temperature: transformers' own 50 likeliest alone would not give these.
    assert len({i for ids in drawn(3) for i in ids}) > 50


def test_parts_of_the_prompts_give_the_same_as_all_at_once(
    engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compared(engine, model)
    monkeypatch.setattr("shakedown.consistency.run._PART", 3)
    parts = compared(engine, model)

    assert (parts.samples, parts.tokens) == (whole.samples, whole.tokens)
    # Padding moves the reference's float32 by its rounding.
    for name, metric in whole.metrics.items():
        assert parts.metrics[name].value == pytest.approx(metric.value, abs=1e-5), name


def test_tables_and_page_of_an_earlier_comparison_do_not_stay_beside_a_new_verdict(
    engine: Engine, model: Path, data: Path
) -> None:
    out = data.parent / "out"
    assert run(engine, model, data, out) == 0
    engine.plant = {"double_bos"}

    assert run(engine, model, data, out) == 1

    assert sorted(path.name for path in out.iterdir()) == ["verdict.json"]


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("no_logprobs", "returned no log-probabilities"),
        ("no_ids", "returned no token ids"),
        ("all_above", "sample 0 position 0: 0.7, above 0"),
        ("refuse", "all 10 requests failed"),
    ],
)
def test_an_engine_that_cannot_be_judged_is_blocked_with_the_reason(
    engine: Engine, model: Path, data: Path, plant: str, said: str
) -> None:
    engine.plant = {plant}
    out = data.parent / "out"
    assert run(engine, model, data, out) == 3
    verdict = read_verdict(out / "verdict.json")
    assert verdict.status == "BLOCKED"
    assert said in verdict.summary
    assert not (out / "report.html").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reference", "transformer:m", "--engine", "http://h", "--data", "d"], "did you mean"),
        (["--reference", "transformers:m", "--engine", "vlm:m", "--data", "d"], "'vllm'"),
        (["--engine", "http://h", "--data", "d"], "--reference is missing"),
        (["--config", "c.yaml"], "belong together"),
        (
            ["--reference", "transformers:m", "--engine", "http://h", "--data", "no.jsonl"],
            "no.jsonl",
        ),
    ],
)
def test_wrong_arguments_are_usage_errors(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["compare", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_reference_model_is_a_usage_error(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        compared(engine, tmp_path)


def test_a_damaged_reference_model_is_blocked(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(BlockedError, match="cannot load"):
        Reference(str(tmp_path))


def test_token_ids_outside_the_vocabulary_are_blocked(engine: Engine) -> None:
    with pytest.raises(BlockedError, match="serves another model"):
        engine.reference.score([Scored([1], [engine.reference.vocabulary])])


def test_a_model_that_is_not_served_is_a_usage_error(engine: Engine, model: Path) -> None:
    with pytest.raises(UsageError, match="it serves policy"):
        compared_by(Plan(engine.url, str(model), ROWS, model="other"))


def test_scores_do_not_depend_on_the_batch(engine: Engine) -> None:
    generator = np.random.default_rng(0)
    items = [
        Scored([1, *generator.integers(3, 90, n)], list(generator.integers(3, 90, 1 + n % 7)))
        for n in range(9)
    ]
    together = engine.reference.score(items, temperature=0.7)
    for item, score in zip(items, together, strict=True):
        (alone,) = engine.reference.score([item], temperature=0.7)
        np.testing.assert_allclose(score.logprobs, alone.logprobs, atol=1e-5)


def test_scores_are_the_model_s_own_log_softmax(engine: Engine) -> None:
    prompt, ids = [1, 4, 5], [6, 7, 8]
    (score,) = engine.reference.score([Scored(prompt, ids)], temperature=2.0)
    for place, token in enumerate(ids):
        logits = engine.logits([*prompt, *ids[:place]])
        for values, heat in ((score.raw, 1.0), (score.logprobs, 2.0)):
            hot = logits / heat
            expected = hot[token] - (hot.max() + math.log(np.exp(hot - hot.max()).sum()))
            assert values[place] == pytest.approx(expected, abs=1e-5)
        first, second = np.sort(logits)[::-1][:2]
        assert score.top_ids[place] == np.argmax(logits)
        assert score.margins[place] == pytest.approx(first - second, abs=1e-5)


def test_the_page_has_factors_before_metrics_samples_and_tokens_and_links_that_lead_somewhere(
    engine: Engine, model: Path
) -> None:
    engine.plant = {"outlier"}
    result = compared(engine, model)
    page = render_report(result, make_verdict(result, Stopwatch()))
    heads = re.findall(r"<h2>(.*?)</h2>", page)
    assert heads == ["Factors", "Metrics", "Other findings", "Samples", "Tokens"]
    links = set(re.findall(r'href="#(.*?)"', page))
    assert {"factors", "samples"} < links
    assert links <= set(re.findall(r'id="(.*?)"', page))
    for row in (*result.explained.rows, *result.explained.noise):
        assert f"<code>{row.factor}</code>" in page


def test_tables_of_samples_and_tokens_are_sums_of_the_same_differences(
    engine: Engine, model: Path
) -> None:
    result = compared(engine, model, dtype="bfloat16")
    samples, tokens = sample_lines(result), token_lines(result)
    mean = result.metrics["mean_abs_dlogp"].value
    # Ten samples of eight tokens each, of which fewer than 80 ids but more than 20 are different.
    assert sum(line.mean for line in samples) / 10 == pytest.approx(mean)
    assert samples[0].mean == max(line.mean for line in samples)
    by_id: dict[int, list[float]] = {}
    for number, each in enumerate(result.shown):
        own = np.abs(result.aligned.r[result.aligned.sample == number])
        for token, size in zip(each.completion.token_ids, own, strict=True):
            by_id.setdefault(int(token), []).append(float(size))
    first = max(by_id, key=lambda token: sum(by_id[token]))
    assert (tokens[0].token, tokens[0].count) == (first, len(by_id[first]))
    assert tokens[0].mean == pytest.approx(np.mean(by_id[first]))
    assert tokens[0].largest == max(by_id[first])
    assert tokens[0].share == pytest.approx(sum(by_id[first]) / (80 * mean))


@pytest.mark.parametrize("row", [{}, {"prompt": 3}, {"messages": ["a"]}, {"messages": {}}])
def test_rows_without_a_prompt_are_refused_by_number(engine: Engine, row: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="data row 2"):
        read_prompts([ROWS[0], row], engine.reference.tokenizer)


def test_hostile_token_text_is_escaped_in_the_page(engine: Engine, model: Path) -> None:
    hostile = "</style><script>alert(1)</script>\u202e\x1b[31m\ud800"
    result = replace(compared(engine, model), decode=lambda _: hostile)
    page = render_report(result, make_verdict(result, Stopwatch()))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page
    assert page.count("</style>") == 1
