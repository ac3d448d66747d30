"""Which server is compared, and in which number format one of our own is started."""

from pathlib import Path
from typing import Any

import pytest

from shakedown.consistency.server import ComparedServer, OwnServer, _spec, open_server
from shakedown.core.errors import UsageError
from shakedown.core.files import write_json


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1"])
def test_a_url_is_taken_as_it_is_without_its_version(url: str, tmp_path: Path) -> None:
    with open_server(url, OwnServer(tmp_path)) as server:
        assert server == ComparedServer("http://h:1")


@pytest.mark.parametrize("engine", ["vlm:m", "vllm", "vllm:", "ftp://h"])
def test_neither_a_url_nor_an_engine_with_a_model_is_refused(engine: str, tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="expected a URL"),
        open_server(engine, OwnServer(tmp_path)),
    ):
        pass


@pytest.mark.parametrize(
    ("body", "dtype", "longest"),
    [
        ({"torch_dtype": "bfloat16", "max_position_embeddings": 512}, "bfloat16", 512),
        ({"dtype": "float32", "max_position_embeddings": 1 << 20}, "float32", 4096),
        ({}, "auto", 4096),
    ],
)
def test_own_server_takes_the_checkpoint_s_format_and_positions(
    tmp_path: Path, body: dict[str, Any], dtype: str, longest: int
) -> None:
    write_json(tmp_path / "config.json", body)

    spec = _spec(str(tmp_path), OwnServer(tmp_path / "server"))

    assert (spec.dtype, spec.max_model_len) == (dtype, longest)


def test_a_given_format_wins_over_the_checkpoint_s(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"dtype": "bfloat16"})

    assert _spec(str(tmp_path), OwnServer(tmp_path / "server", "float32")).dtype == "float32"


def test_a_checkpoint_with_damaged_positions_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"max_position_embeddings": "many"})

    with pytest.raises(UsageError, match="is not a model config"):
        _spec(str(tmp_path), OwnServer(tmp_path / "server"))
