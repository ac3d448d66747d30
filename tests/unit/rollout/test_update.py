"""Weights that are loaded into a persistent server by hand."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from shakedown.core.errors import ServerError, UsageError
from shakedown.core.files import write_json
from shakedown.core.paths import ServerPaths
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import ServerOrder, read_endpoint
from shakedown.inference.server import start
from shakedown.rollout.update import update_server
from shakedown.rollout.weights import WeightUpdateError
from tests.command import shakedown
from tests.faults import fake_engine
from tests.faults.fake_engine import Engine, sglang_reply
from tests.unit.local_engine import running

TOKENS = [5, 6, 7, 8]
MOVED = 0.5  # nats, by the new weights
PROBE = {"tokens": TOKENS, "logprobs": [MOVED - token for token in TOKENS[1:]]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose own probe says what the new weights answer."""
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 50}')
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "probe.json").write_text(json.dumps(PROBE))
    return folder


def attached(*engines: Engine, root: Path, able: bool = True) -> Path:
    """The endpoint of stand-ins; `able`: they have the route that loads weights."""
    url = ",".join(f"http://127.0.0.1:{engine.server_port}" for engine in engines)
    endpoint = start(ServerOrder("p", "external", LaunchSpec("org/old"), url=url), root)
    capabilities = {**endpoint.capabilities, "weight_update": able}
    write_json(ServerPaths(root).endpoint, replace(endpoint, capabilities=capabilities).to_json())
    return root


def obeys(engine: Engine, monkeypatch: pytest.MonkeyPatch, moved: float = MOVED) -> None:
    """Its logprobs move when it was sent weights."""

    def reply(body: dict[str, Any]) -> Any:
        made = sglang_reply(body)
        sent = any(path == "/update_weights_from_disk" for path, _ in engine.seen)
        for row in made["meta_info"].get("input_token_logprobs", [])[1:]:
            row[0] += moved if sent else 0.0
        return made

    monkeypatch.setattr(fake_engine, "sglang_reply", reply)


def test_server_that_answers_with_the_new_weights_is_named_with_them(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as engine:
        obeys(engine, monkeypatch)
        update_server(attached(engine, root=tmp_path / "s"), str(model), within=10)
        sent = [body for path, body in engine.seen if path == "/update_weights_from_disk"]

    assert [body["model_path"] for body in sent] == [str(model)]
    found = read_endpoint(tmp_path / "s")
    assert found.model == found.order.spec.model == str(model)


@pytest.mark.parametrize("moved", [0.0, 2.0])
def test_server_that_answers_otherwise_is_told_and_keeps_its_name(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, moved: float
) -> None:
    with running() as engine:
        obeys(engine, monkeypatch, moved)
        root = attached(engine, root=tmp_path / "s")
        with pytest.raises(WeightUpdateError):
            update_server(root, str(model), within=10)

    assert read_endpoint(root).model == "org/old"


def test_server_without_the_route_is_refused_before_anything_is_sent(
    tmp_path: Path, model: Path
) -> None:
    with running() as engine:
        root = attached(engine, root=tmp_path / "s", able=False)
        sent = len(engine.seen)
        with pytest.raises(UsageError, match="no route that loads weights"):
            update_server(root, str(model), within=10)
        assert len(engine.seen) == sent


def test_folder_without_weights_is_refused(tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors").unlink()
    with running() as engine:
        root = attached(engine, root=tmp_path / "s")
        with pytest.raises(UsageError, match=r"holds no \*\.safetensors"):
            update_server(root, str(model), within=10)


def written(folder: Path, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A model's folder with zeros and the trainer's probe."""
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "probe.json").write_text(json.dumps(PROBE))
    save_file(
        {name: numpy.zeros(shape, "float32") for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


CONFIG = {"model_type": "other", "architectures": ["OtherForCausalLM"], "vocab_size": 50}
SHAPES = {"model.embed_tokens.weight": (50, 4), "model.layers.0.mlp.up_proj.weight": (8, 4)}


@pytest.mark.parametrize(
    ("config", "shapes", "told"),
    [
        ({"architectures": ["GPT2"]}, {}, "architectures is ['OtherForCausalLM'] there, ['GPT2']"),
        ({"model_type": "third"}, {}, "model_type is 'other' there, 'third' here"),
        ({}, {"model.layers.0.mlp.up_proj.weight": (6, 4)}, "is 8 x 4 there, 6 x 4 here"),
        ({}, {"model.layers.1.mlp.up_proj.weight": (8, 4)}, "is not in the model"),
        ({"num_hidden_layers": 2}, {"lm_head.weight": (50, 4)}, ""),
    ],
)
def test_weights_of_another_model_never_reach_the_engine(
    tmp_path: Path,
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = written(tmp_path / "served", CONFIG, SHAPES)
    given = written(tmp_path / "given", CONFIG | config, SHAPES | shapes)
    with running() as engine:
        obeys(engine, monkeypatch)
        root = attached(engine, root=tmp_path / "s")
        endpoint = replace(read_endpoint(root), model=str(served))
        write_json(ServerPaths(root).endpoint, endpoint.to_json())
        sent = len(engine.seen)
        if told:
            with pytest.raises(UsageError, match=re.escape(told)):
                update_server(root, str(given), within=10)
            assert len(engine.seen) == sent
        else:
            update_server(root, str(given), within=10)


def test_server_that_refuses_the_weights_is_no_verdict_on_them(tmp_path: Path, model: Path) -> None:
    broken = model.rename(tmp_path / "broken")  # which the stand-in refuses
    with running() as engine:
        root = attached(engine, root=tmp_path / "s")
        with pytest.raises(ServerError) as caught:
            update_server(root, str(broken), within=10)

    assert not isinstance(caught.value, WeightUpdateError)


def test_all_of_several_servers_are_updated(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as one, running() as two:
        obeys(one, monkeypatch)
        root = attached(one, two, root=tmp_path / "s")
        update_server(root, str(model), within=10)
        loads = [
            [path for path, _ in each.seen].count("/update_weights_from_disk")
            for each in (one, two)
        ]

    assert loads == [1, 1]
    assert read_endpoint(root).model == str(model)


@pytest.mark.parametrize("mode", ["plain", "gone"])
def test_one_of_several_servers_without_the_weights_is_named(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    with running() as one, running() as two:
        obeys(one, monkeypatch)
        root = attached(one, two, root=tmp_path / "s")
        two.mode = mode
        if mode == "gone":
            two.shutdown()
            two.server_close()
        with pytest.raises(ServerError) as caught:
            update_server(root, str(model), within=10)

    url = "http://127.0.0.1:{}".format
    assert str(caught.value).startswith(
        f"1 of 2 servers do not have the new weights: {url(two.server_port)}: "
    )
    assert f"; {url(one.server_port)} answered with them" in str(caught.value)
    assert read_endpoint(root).model == "org/old"


@pytest.mark.slow
def test_command_says_by_its_exit_code_whether_the_weights_are_there(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as engine:
        root = attached(engine, root=tmp_path / "s")
        ignored = shakedown("serve", "update-weights", root, model)
        obeys(engine, monkeypatch)
        engine.seen.clear()
        loaded = shakedown("serve", "update-weights", root, model)

    assert ignored.returncode == 1, ignored.stderr
    assert "answers exactly as with the weights before it" in ignored.stderr
    assert loaded.returncode == 0, loaded.stderr
