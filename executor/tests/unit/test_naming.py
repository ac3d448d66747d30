"""What other users of the cluster can read of a job: its name and its comment."""

import pytest

from snakemake_executor_plugin_submitit.journal import is_name_of, name_ending
from snakemake_executor_plugin_submitit.submit import is_array_too_large, job_comment, job_name

RUN = "20260314-101500-a1b2c3d4"
ENDING = name_ending(RUN, 7)


def test_a_name_has_each_rule_once_and_ends_in_the_batchs_mark() -> None:
    assert job_name(["train", "eval", "train"], prefix="", ending=ENDING) == "train+eval-a1b2c3d4.7"
    assert job_name(["train"], prefix="mine", ending=ENDING) == "mine-train-a1b2c3d4.7"


@pytest.mark.parametrize("rule", ["a b", "$(id)", "x\n#SBATCH --wrap=y", "grün", "a/b|c"])
def test_a_name_holds_nothing_but_plain_letters(rule: str) -> None:
    name = job_name([rule], prefix="", ending=ENDING)

    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-.")


def test_a_long_name_keeps_the_batchs_mark() -> None:
    names = [f"rule{number}" for number in range(99)]

    name = job_name(names, prefix="p" * 50, ending=ENDING)

    assert len(name) == 60
    assert name.endswith(ENDING)


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("train-a1b2c3d4.7", True),
        ("train-a1b2c3d4.70", True),
        ("train-a1b2c3d4", False),
        ("train-a1b2c3d4.7x", False),
        ("train-ffffffff.7", False),
        ("traina1b2c3d4.7", False),
    ],
)
def test_a_runs_jobs_are_known_by_their_names(name: str, is_own: bool) -> None:
    assert is_name_of(RUN, name) is is_own


def test_a_comment_is_one_short_line_of_rules_and_wildcards() -> None:
    assert job_comment(["align sample=a", "align sample=b"]) == "align sample=a; align sample=b"
    assert job_comment(["x\n#SBATCH --wrap=y", "ü"]) == "x #SBATCH --wrap=y;  "
    assert len(job_comment([f"align sample={number}" for number in range(99)])) == 200


def test_only_sbatchs_words_for_a_large_array_are_taken_for_that() -> None:
    assert is_array_too_large("sbatch: error: ... failed: Invalid job array specification")
    assert not is_array_too_large("sbatch: error: invalid partition specified: array")
