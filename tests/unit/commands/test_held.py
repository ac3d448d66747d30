"""A folder that another process writes is refused by every command that would write it, too."""

from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.core.lease import hold

CONFIG = str(Path(__file__).parents[3] / "config" / "config.yaml")
WRITERS = {
    "agent run": ["my_agent.py:Agent", "--data", "rows.jsonl"],
    "agent checks": ["--config", CONFIG, "--endpoint", "endpoint.json"],
    "assets": ["--config", CONFIG],
    "compare": ["--reference", "transformers:m", "--engine", "vllm:m", "--data", "rows.jsonl"],
}


@pytest.mark.parametrize("command", WRITERS)
def test_a_held_folder_is_refused_in_one_sentence_and_nothing_in_it_changes(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "verdict.json"
    earlier.write_text("of the first")

    with hold(tmp_path, "somebody's run"):
        code = main([*command.split(), *WRITERS[command], "--out", str(tmp_path)])

    refused, following = capsys.readouterr().err.splitlines()
    assert code == 2
    assert refused.startswith(f"shakedown: {tmp_path} is in use: somebody's run (pid ")
    assert following.startswith("  next: wait for it")
    assert earlier.read_text() == "of the first"
