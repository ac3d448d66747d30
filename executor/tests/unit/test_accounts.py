"""Accounts: the first that the user has, a guess where none is named, no database no verdict."""

import os
import pwd
from pathlib import Path

import pytest
from slurm_programs import Programs

from snakemake_executor_plugin_submitit.accounts import (
    Accounts,
    guess,
    last_account,
    parse,
    wants_account,
)
from snakemake_executor_plugin_submitit.values import ResourceError

USER = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    # Names that a user may set are not asked.
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.setenv("USER", "somebody")
    return Programs(tmp_path, monkeypatch)


def test_the_first_account_that_the_user_has_is_chosen_and_asked_for_once(
    programs: Programs,
) -> None:
    programs.answer("sacctmgr", "lab\nOther\nlab\n")
    accounts = Accounts()

    assert accounts.chosen(["lab"]) == "lab"
    assert accounts.chosen(["nobodys", "other", "lab"]) == "Other"
    assert accounts.chosen(["LAB"]) == "lab"
    (call,) = programs.calls
    assert f"list user {USER} format=account" in call


def test_an_account_that_the_user_lacks_is_refused_with_those_there_are(
    programs: Programs,
) -> None:
    programs.answer("sacctmgr", "lab\nother\n")

    with pytest.raises(ResourceError, match=r"slurm_account='moon,mars': .* valid: lab, other"):
        Accounts().chosen(["moon", "mars"])


@pytest.mark.parametrize("error", ["You are not running a supported accounting_storage plugin", ""])
def test_without_a_database_or_a_record_nothing_is_checked(programs: Programs, error: str) -> None:
    programs.answer("sacctmgr", error=error)
    accounts = Accounts()

    assert accounts.chosen(["moon", "mars"]) == "moon"
    assert accounts.chosen(["sun"]) == "sun"
    assert programs.called("sacctmgr") == 1


def test_without_sacctmgr_nothing_is_checked(programs: Programs) -> None:
    assert Accounts().chosen(["moon"]) == "moon"
    assert guess() is None


def test_the_default_account_is_guessed(programs: Programs) -> None:
    programs.answer("sacctmgr", "lab\n")

    assert guess() == "lab"
    assert f"list user {USER} format=defaultaccount" in programs.calls[0]


def test_without_a_default_the_last_jobs_account_is_guessed(programs: Programs) -> None:
    programs.answer("sacctmgr", "\n")
    programs.answer("sacct", "2026-03-02T10:00:00|late\n2026-03-01T10:00:00|early\n")

    assert guess() == "late"
    assert f"--user {USER}" in programs.calls[1]


def test_a_user_without_a_record_has_no_guess(programs: Programs) -> None:
    programs.answer("sacctmgr", error="no database")
    programs.answer("sacct", "2026-03-02T10:00:00|\n2026-03-01T10:00:00|(null)\n")

    assert guess() is None


def test_a_uid_without_a_name_is_not_asked_about(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.answer("sacctmgr", "lab\n")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)

    assert Accounts().chosen(["moon"]) == "moon"
    assert guess() is None
    assert programs.calls == []


@pytest.mark.parametrize(
    ("words", "account"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition"
            " combination specified",
            True,
        ),
        (
            "sbatch: error: Batch job submission failed: Job's account not permitted to use this"
            " partition (high allows lab not root)",
            True,
        ),
        ("sbatch: error: You must specify an account with --account", True),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", False),
        ("Job violates accounting/QOS policy (job submit limit)", False),
        ("", False),
    ],
)
def test_a_refusal_because_of_the_account_is_told_from_others(words: str, account: bool) -> None:
    assert wants_account(words) is account


def test_lines_that_name_no_account_are_passed_over() -> None:
    assert parse(" lab |\n\n(null)\nnone\nLab\nlab\n") == ["lab", "Lab"]
    assert last_account("") is None
    assert last_account("nonsense\n2026-03-01T10:00:00|lab\n") == "lab"
