"""The comparison's benchmark against its scripted server, and what it counts as a token."""

import subprocess
import sys
from pathlib import Path

import consistency
import pytest

from shakedown.training.demo import addition_rows, write_model

SCRIPT = Path(consistency.__file__)


def _rows(text: str) -> list[list[str]]:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [row for row in cells if row and row[0].replace(",", "").isdecimal()]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_both_sides_compare_the_same_prompts_and_memory_is_told_for_each_size() -> None:
    command = [sys.executable, str(SCRIPT), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    one, whole, small, large = _rows(done.stdout)
    # 8 prompts of 16 tokens: greedy ones, and for us as many sampled ones.
    assert (one[0], one[3]) == ("8", "128")
    assert (whole[0], whole[3]) == ("8", "256")
    assert (small[0], large[0]) == ("1,024", "4,032")
    assert float(large[2].replace(",", "")) > 100


@pytest.mark.slow
def test_the_peers_loop_asks_for_every_prompt_and_counts_the_servers_tokens(tmp_path: Path) -> None:
    write_model(tmp_path / "model", seed=0)
    rows, _ = addition_rows(train_size=3, heldout_size=0, seed=0)

    with consistency.scripted_engine() as server:
        run = consistency.one_at_a_time(tmp_path / "model", server, rows)()

    assert run.tokens == 3 * consistency.ANSWER
    assert run.seconds > 0
