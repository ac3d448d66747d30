"""What other users of the cluster can read of a job: its name."""

import pytest

from snakemake_executor_plugin_submitit.journal import name_ends
from snakemake_executor_plugin_submitit.submit import is_array_too_large, job_name

ENDS = name_ends("20260314-101500-a1b2c3")


def test_a_name_has_each_rule_once_and_ends_in_the_runs_mark() -> None:
    assert job_name(["train", "eval", "train"], ENDS) == "train+eval-a1b2c3"


@pytest.mark.parametrize("rule", ["a b", "$(id)", "x\n#SBATCH --wrap=y", "grün", "a/b|c"])
def test_a_name_holds_nothing_but_plain_letters(rule: str) -> None:
    name = job_name([rule], ENDS)

    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-.")


def test_a_long_name_keeps_the_runs_mark() -> None:
    name = job_name([f"rule{number}" for number in range(99)], ENDS)

    assert len(name) == 60
    assert name.endswith(ENDS)


def test_only_sbatchs_words_for_a_large_array_are_taken_for_that() -> None:
    assert is_array_too_large("sbatch: error: ... failed: Invalid job array specification")
    assert not is_array_too_large("sbatch: error: invalid partition specified: array")
