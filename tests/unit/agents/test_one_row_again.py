"""A row that failed runs again alone, by the command that the verdict names."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.agents.episode_lines import read_episodes
from shakedown.cli import main
from shakedown.core.verdict import read_verdict
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import ServerOrder
from shakedown.inference.server import start
from tests.unit.rollout.chat_engine import ChatEngine, chatting

REPOSITORY = Path(__file__).parents[3]
TARGET = f"{REPOSITORY}/tests/unit/rollout/agent_kinds.py:Kinds"
GOOD, BAD = {"kind": "single"}, {"kind": "raises"}


@pytest.fixture(scope="module")
def engine() -> Iterator[ChatEngine]:
    with chatting() as engine:
        yield engine


def write(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_episodes(folder / "episodes.jsonl"))


def again(folder: Path, *more: str) -> list[str]:
    """The arguments of the command that the verdict in a folder names."""
    words = shlex.split(read_verdict(folder / "verdict.json").next)
    assert words[0] == "shakedown"
    return [*words[1:], *more]


def test_the_next_command_of_a_run_that_failed_runs_the_first_failing_row(
    engine: ChatEngine, tmp_path: Path
) -> None:
    argv = ["agent", "run", TARGET.replace("Kinds", "Doubling"), "--kwargs", "factor=2.5"]
    argv += ["--data", write(tmp_path, GOOD, GOOD, BAD, GOOD, BAD), "--group-size", "2"]
    argv += ["--base-url", engine.url, "--model", "policy", "--episode-timeout", "30"]
    out = tmp_path / "my out"

    assert main([*argv, "--out", str(out), "--separate-tls"]) == 1
    command = again(out)
    code = main(command)

    assert code == 1
    (line,) = lines(out / "row-2")
    assert (line["row"], line["cause"]) == (2, "exception")
    assert {"--separate-tls", "--model", "30"} <= set(command)
    assert len(lines(out)) == 10
    assert "never works" in (out / "episodes.html").read_text(encoding="utf-8")
    assert again(out / "row-2") == command


def test_a_row_can_be_repeated(engine: ChatEngine, tmp_path: Path) -> None:
    argv = ["agent", "run", TARGET, "--data", write(tmp_path, BAD, GOOD), "--base-url", engine.url]

    code = main([*argv, "--out", str(tmp_path / "out"), "--row", "1", "--repeat", "3"])

    assert code == 0
    assert [line["row"] for line in lines(tmp_path / "out")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--row", "2"], "--row 2: "),
        (["--row", "-1"], "expected a whole number from 0"),
        (["--row", "0", "--limit", "1"], "not allowed with argument"),
        (["--repeat", "2"], "add --row N"),
    ],
)
def test_a_row_that_is_not_there_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    argv = ["agent", "run", TARGET, "--data", write(tmp_path, GOOD, GOOD), *options]
    try:
        code = main(argv)
    except SystemExit as ended:  # argparse's own way
        code = int(ended.code or 0)

    assert code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_next_command_of_checks_that_failed_does_it_with_the_configs_values(
    engine: ChatEngine, tmp_path: Path
) -> None:
    overlay = tmp_path / "own.yaml"
    agents = {"target": TARGET, "prompts": 3, "group_size": 2, "episode_timeout": 20.0}
    overlay.write_text(json.dumps({"agents": agents}), encoding="utf-8")
    start(ServerOrder("policy", "external", LaunchSpec("policy"), url=engine.url), tmp_path / "s")
    config = [str(REPOSITORY / "config" / "config.yaml"), str(overlay)]
    argv = ["agent", "checks", "--config", *config, "--endpoint", str(tmp_path / "s")]
    data = write(tmp_path, GOOD, BAD)

    assert main([*argv, "--data", data, "--out", str(tmp_path / "out")]) == 1
    code = main(again(tmp_path / "out", "--repeat", "2"))

    assert code == 1
    found = lines(tmp_path / "out" / "row-1")
    assert [(line["check"], line["row"]) for line in found] == [("row", 1), ("row", 1)]
    verdict = read_verdict(tmp_path / "out" / "row-1" / "verdict.json")
    assert verdict.metrics["row_episodes_failed"] == 2
