"""The run's own code is tried on the node, and what comes from the hub is looked for."""

import argparse
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shakedown.commands.preflight import (
    _expectations,
    _from_hub,
    _leaves,
    _parts,
    add_arguments,
)
from shakedown.config import load_config
from shakedown.core.errors import UsageError
from shakedown.preflight.checks import hub, parts
from shakedown.preflight.datatypes import Expectations, ProbeRequest

pytest.importorskip("openai")
ROOT = Path(__file__).parents[3]
AGENT = """
class Good:
    async def run(self, data, **extra_kwargs):
        from openai import AsyncOpenAI

        async with AsyncOpenAI(
            base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"]
        ) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=data["messages"]
            )
        return float("4" in answer.choices[0].message.content)


class Needs:
    def __init__(self, path):
        self.path = path

    async def run(self, data, **extra_kwargs):
        from openai import AsyncOpenAI

        async with AsyncOpenAI(
            base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"]
        ) as client:
            model = (await client.models.list()).data[0].root
            if self.path == "responses":
                answer = await client.responses.create(model=model, input="2 + 2")
                return float("4" in answer.output_text)
            answer = await client.completions.create(model=model, prompt=[1], logprobs=0)
            return answer.choices[0].logprobs.token_logprobs[0]


class Raises:
    async def run(self, data, **extra_kwargs):
        return data["image"]


class NotAsync:
    def run(self, data, **extra_kwargs):
        return 1.0


def reward(completion, answer):
    return 1.0


def no_number(completion, answer):
    return "much"
"""


def asked(limit: float = 120.0, **want: object) -> ProbeRequest:
    return ProbeRequest(
        {"n1": "127.0.0.1"},
        "out",
        "t",
        want=Expectations(**want),  # type: ignore[arg-type]
        limit=limit,
    )


@pytest.mark.slow
def test_each_part_is_called_once_and_those_that_do_not_work_are_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(AGENT)
    good = [("agent", f"{file}:Good"), ("reward", f"{file}:reward"), ("reward", "gsm8k")]
    needs = [("agent", f"{file}:Needs", f'{{"path": "{p}"}}') for p in ("responses", "completions")]
    bad = [("agent", f"{file}:NotAsync"), ("reward", f"{file}:no_number"), ("sink", "nonsense")]
    bad += [("agent", f"{file}:Needs")]
    raises = [("agent", f"{file}:Raises")]

    facts = parts.measure(asked(parts=[*good, *needs, *bad, *raises], model="m"), "n1")

    assert set(facts["faults"]) == {" ".join(part) for part in bad}
    assert set(facts["raised"]) == {" ".join(part) for part in raises}
    assert "missing 1 required" in facts["faults"][f"agent {file}:Needs"]
    assert "not async" in facts["faults"][f"agent {file}:NotAsync"]
    assert "image" in facts["raised"][f"agent {file}:Raises"]


def test_a_part_that_never_ends_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import time\ntime.sleep(600)\n")

    facts = parts.measure(asked(limit=1.0, parts=[("reward", f"{file}:f")]), "n1")

    assert facts["faults"] == {f"reward {file}:f": "did not finish within 0.8 s"}


def test_faults_fail_and_what_raised_is_a_warning() -> None:
    want = Expectations(parts=[("reward", "gsm8k")])

    assert parts.judge({"faults": {}, "raised": {}}, want).status == "pass"
    assert parts.judge({"faults": {}, "raised": {"a": "b"}}, want).status == "warn"
    assert parts.judge({"faults": {"a": "b"}, "raised": {}}, want).status == "fail"


def test_the_shipped_config_names_its_parts_and_nothing_of_the_hub() -> None:
    config = load_config(ROOT / "config" / "config.yaml")

    assert ("reward", "exact_match") in _parts(config)
    assert ("agent", "config/examples/my_agent.py:MyAgent") in _parts(config)
    needs = config.agents.model_copy(update={"kwargs": {"turns": 2}})
    told = _parts(config.model_copy(update={"agents": needs}))
    assert ("agent", "config/examples/my_agent.py:MyAgent", '{"turns": 2}') in told
    assert _from_hub(config) == []


def test_the_configs_baseline_and_leaves_are_read(tmp_path: Path) -> None:
    overlay, baseline = tmp_path / "mine.yaml", tmp_path / "site.json"
    baseline.write_text('{"schema": "shakedown/preflight-baseline/1", "values": {"gemm": 7.0}}')
    overlay.write_text(
        f"preflight: {{baseline: {baseline}}}\ncluster: {{leaves: {{a: 'n[1-2]', b: n3}}}}\n"
    )
    config = load_config(ROOT / "config" / "config.yaml", overlay)

    assert _expectations(_arguments(), config).baseline == {"gemm": 7.0}
    assert _leaves(config) == {"a": ["n1", "n2"], "b": ["n3"]}


def test_leaves_that_are_no_list_of_nodes_are_refused_by_their_key(tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("cluster: {leaves: {a: 'n[1-'}}\n")
    config = load_config(ROOT / "config" / "config.yaml", overlay)

    with pytest.raises(UsageError, match=r"^cluster\.leaves: "):
        _leaves(config)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([])


def test_what_comes_from_the_hub_is_named_as_its_cache_has_it(tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("model: {source: Qwen/Qwen3-0.6B}\ndata: {train: gsm8k, heldout: gsm8k}\n")
    config = load_config(ROOT / "config" / "config.yaml", overlay)

    assert _from_hub(config) == ["models/Qwen/Qwen3-0.6B", "datasets/openai/gsm8k"]


class _Quiet(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


NAME = "models/Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("cached", "offline", "reached", "status"),
    [
        (True, "1", False, "pass"),
        (True, "", False, "pass"),
        (False, "1", True, "fail"),
        (False, "", False, "fail"),
        (False, "", True, "warn"),
    ],
)
def test_what_is_not_cached_must_be_reached(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    *,
    cached: bool,
    offline: str,
    reached: bool,
    status: str,
) -> None:
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(tmp_path / ("blob" if cached else "gone"))
    (tmp_path / "blob").touch()
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", endpoint if reached else "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    found = hub.judge(hub.measure(asked(hub=[NAME]), "n1"), Expectations())

    assert found.status == status
    if status == "warn":
        assert found.remedy == "once, before the run: hf download Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("where", ["", "variable", "file"])
def test_a_missing_token_is_told_where_something_is_to_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, where: str
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN_PATH", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    if where == "variable":
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
    if where == "file":
        (tmp_path / "token").write_text("hf_secret")

    facts = hub.measure(asked(hub=[NAME]), "n1")

    assert "hf_secret" not in str(facts)
    assert ("HF_TOKEN" in hub.judge(facts, Expectations()).remedy) == (not where)


def test_an_endpoint_that_is_no_web_address_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc/passwd")

    assert "no web address" in hub.measure(asked(hub=[NAME]), "n1")["unreached"]
