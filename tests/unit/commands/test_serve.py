"""What `shakedown serve start` makes of a config and its own arguments."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from shakedown.cli import command_parser
from shakedown.commands import serve
from shakedown.core.errors import UsageError
from shakedown.core.files import write_json

CONFIG = """
run: r
model: {source: demo, dtype: bfloat16}
data: {train: demo, heldout: demo}
cluster: {launcher: slurm, partition: gpu, account: team, gpus_per_node: 4}
serve: {max_model_len: 512, kv_cache_gb: 0.5, lease: 60.0, extra_args: ["--max-num-seqs", "8"]}
agents: {target: "a:B"}
stages:
  sft: {algorithm: sft, allocation: "fsdp:d1", steps: 1, batch_size: 1, optimizer: {lr: 0.1}}
seed: 5
"""


def parsed(*arguments: object) -> argparse.Namespace:
    _, parser = command_parser("serve")
    return parser.parse_args(["start", "--out", "out", *map(str, arguments)])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    assets = {"schema": "shakedown/assets/1", "model": "/the/model", "train": "t", "heldout": "h"}
    write_json(tmp_path / "assets.json", assets)
    return path


def test_config_says_what_is_served_and_where(config: Path) -> None:
    order = serve._order(parsed("--config", config, "--assets", config.parent / "assets.json"))

    assert (order.spec.model, order.spec.dtype, order.spec.seed) == ("/the/model", "bfloat16", 5)
    assert (order.spec.max_model_len, order.spec.kv_cache_gb) == (512, 0.5)
    assert order.spec.extra_args == ("--max-num-seqs", "8")
    assert (order.launcher, order.lease) == ("slurm", 60.0)
    assert (order.slurm.partition, order.slurm.account, order.slurm.gpus) == ("gpu", "team", 4)
    assert order.spec.logprobs == "raw"


@pytest.mark.parametrize(
    ("config_says", "given", "expected"),
    [("", (), "raw"), ("processed", (), "processed"), ("processed", ("--logprobs", "raw"), "raw")],
)
def test_logprobs_are_raw_unless_the_config_or_the_command_line_says_otherwise(
    config: Path, config_says: str, given: tuple[str, ...], expected: str
) -> None:
    if config_says:
        text = config.read_text()
        config.write_text(text.replace("serve: {", f"serve: {{logprobs: {config_says}, "))

    order = serve._order(
        parsed("--config", config, "--assets", config.parent / "assets.json", *given)
    )

    assert order.spec.logprobs == expected


def test_command_line_wins_over_the_config(config: Path) -> None:
    order = serve._order(
        parsed(
            *("--config", config, "--assets", config.parent / "assets.json"),
            *("--launcher", "local", "--port", 8123, "--max-model-len", 64, "--lease", 5),
            *("--extra-args=--foo 'a b'", "--engine", "transformers"),
        )
    )

    assert (order.launcher, order.lease) == ("local", 5.0)
    assert (order.spec.port, order.spec.max_model_len) == (8123, 64)
    assert order.spec.extra_args == ("--foo", "a b")
    assert (order.engine, order.spec.allocation) == ("transformers", "")


def test_nothing_to_serve_is_bad_input() -> None:
    with pytest.raises(UsageError, match="nothing to serve was given"):
        serve._order(parsed("--engine", "vllm"))


def test_open_quote_in_arguments_is_bad_input(config: Path) -> None:
    with pytest.raises(UsageError, match="--extra-args"):
        serve._order(parsed("--engine", "vllm", "--model", "m", "--extra-args='open"))


def test_port_that_is_none_is_refused() -> None:
    with pytest.raises(SystemExit):
        parsed("--port", 70000)


def test_folder_without_a_server_is_bad_input(tmp_path: Path) -> None:
    for action in ("status", "ensure"):
        done = subprocess.run(
            [sys.executable, "-m", "shakedown.cli", "serve", action, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "next: shakedown serve start" in done.stderr
