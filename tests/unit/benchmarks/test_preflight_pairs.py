"""The simulation of pair rounds, small: every rule gets a row, and the sure cases come out sure."""

import random
import subprocess
import sys
from pathlib import Path

import preflight_pairs as benchmark
import pytest

SCRIPT = Path(benchmark.__file__)


def run(*arguments: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows]


def test_every_rule_has_a_row_and_no_rule_misses_what_is_twice_as_slow() -> None:
    draw = random.Random(1)

    scores = benchmark.slow_scores(32, 1, 0.6, draw)

    assert {name: score.found for name, score in scores.items()} == dict.fromkeys(scores, 1.0)
    assert set(scores) == {*benchmark.RULES, benchmark.WHOLE}


def test_the_table_of_slow_nodes_has_a_row_for_every_rule_and_count() -> None:
    rows = run("slow", "--sizes", "8", "32", "--runs", "2")

    counts = [row[:2] for row in rows[2::5]]
    assert counts == [["8", "0"], ["8", "1"], ["32", "0"], ["32", "1"], ["32", "2"]]
    assert all((cell == "") == (row[1] == "0") for row in rows[2:] for cell in row[3:5])
    assert all(0.0 <= float(cell or 0.0) <= 1.0 for row in rows[2:] for cell in row[3:5])


@pytest.mark.parametrize("count", [8, 32])
def test_a_dead_node_is_found_by_every_search_and_a_pair_alone_accuses_its_partner(
    count: int,
) -> None:
    names = benchmark.names_of(count)
    fault = benchmark.Fault(nodes=frozenset({names[3]}))

    scores = {name: search(names, fault) for name, search in benchmark.SEARCHES.items()}

    assert {score.found for score in scores.values()} == {1.0}
    innocents = {name: score.innocents for name, score in scores.items() if score.innocents}
    assert innocents == {"one round, both suspect": 1}


def test_a_dead_link_of_eight_nodes_is_named_as_a_link_and_a_dead_direction_as_one() -> None:
    names = benchmark.names_of(8)
    link = benchmark.Fault(links=frozenset({(names[1], names[6])}))
    way = benchmark.Fault(ways=frozenset({f">{names[2]}"}))

    assert benchmark.by_pairs(names, link) == benchmark.Score(1.0, 0, 0, 7)
    assert benchmark.by_reach(names, link) == benchmark.Score(1.0, 0, 0, 1)
    assert benchmark.by_reach(names, way) == benchmark.Score(1.0, 0, 0, 1)
    assert benchmark.by_two_rounds(names, link).found == 0.0


def test_equal_seeds_give_equal_rows() -> None:
    arguments = ("dead", "--sizes", "8", "--runs", "3")

    assert run(*arguments) == run(*arguments)


def test_the_curves_are_a_picture(tmp_path: Path) -> None:
    run("--curves", str(tmp_path / "slow.svg"), "--runs", "1")

    body = (tmp_path / "slow.svg").read_text(encoding="utf-8")
    assert body.startswith("<svg")
    shown = ("DLRover", "Megatron", "Azure", "ours")
    assert [name for name in shown if f">{name}</text>" not in body] == []


@pytest.mark.parametrize("size", ["7", "2", "0"])
def test_a_size_that_makes_no_pairs_is_refused(size: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--sizes", size], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "expected even numbers from 4 on" in done.stderr
