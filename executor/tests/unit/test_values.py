"""Values are read strictly: what Slurm would misread, or a script line, is refused."""

from typing import Any

import pytest

from snakemake_executor_plugin_submitit.values import (
    ResourceError,
    line,
    node_names,
    number,
    option,
    slurm_seconds,
    switch,
)


@pytest.mark.parametrize(("value", "read"), [(3, 3), (3.0, 3), ("3", 3), (" 3 ", 3), ("-1", -1)])
def test_a_whole_number_may_be_a_text(value: Any, read: int) -> None:
    assert number("resource gpu", value) == read


@pytest.mark.parametrize(
    "value", [1.5, True, "", "1h", "1.0", "²", "9" * 10**5, float("inf"), float("nan"), None, [3]]
)
def test_what_is_no_whole_number_is_refused_in_few_words(value: Any) -> None:
    with pytest.raises(ResourceError, match=r"resource gpu=.*expected a whole number") as caught:
        number("resource gpu", value)

    assert len(str(caught.value)) < 200


def test_a_number_below_the_least_is_refused() -> None:
    assert number("resource nodes", "1", 1) == 1
    with pytest.raises(ResourceError, match="resource nodes=0: expected at least 1"):
        number("resource nodes", "0", 1)


def test_a_text_may_be_a_number() -> None:
    assert line("resource slurm_account", 123456) == "123456"


@pytest.mark.parametrize("value", ["a\nb", "a\0b", "a\x1b[2J", True, 1.5, ["a"], None])
def test_what_is_no_text_of_one_line_is_refused(value: Any) -> None:
    with pytest.raises(ResourceError, match="expected a text of one line"):
        line("resource qos", value)


def test_a_backslash_reaches_no_option() -> None:
    # Inside quotes it ends the value elsewhere for sbatch than for a shell.
    with pytest.raises(ResourceError, match=r"resource qos=.*no backslash"):
        option("resource qos", "x\\' --job-name=evil 'y")


@pytest.mark.parametrize(
    ("value", "read"), [(True, True), (0, False), ("False", False), ("yes", True), ("no", False)]
)
def test_a_switch_may_be_a_number_or_a_text(value: Any, read: bool) -> None:
    assert switch("resource requeue", value) is read


@pytest.mark.parametrize("value", ["maybe", 2, "", None])
def test_what_is_no_switch_is_refused(value: Any) -> None:
    with pytest.raises(ResourceError, match=r"resource requeue=.*expected true or false"):
        switch("resource requeue", value)


def test_node_names_are_kept_in_order_each_once() -> None:
    names = node_names(" n[1-3,7], gpu-01.rack_2,n[1-3,7],a[1-2]b[3],", "resource exclude")

    assert names == ["n[1-3,7]", "gpu-01.rack_2", "a[1-2]b[3]"]


@pytest.mark.parametrize(
    "text",
    ["None assigned", "(null)", "--wrap=x", "-n1", "n1;id", "n1 n2", "n[1-2", "n1]", "n[a]", "n$X"],
)
def test_what_is_no_nodes_name_is_refused(text: str) -> None:
    with pytest.raises(ResourceError, match=r"resource exclude: .* is not a node name"):
        node_names(text, "resource exclude")


@pytest.mark.timeout(60)  # a quadratic search takes hours
@pytest.mark.parametrize("text", ["[" * 10**6, "n" * 10**6 + "!", "n[1," * 10**6])
def test_a_huge_list_of_nodes_is_refused_in_few_words(text: str) -> None:
    with pytest.raises(ResourceError, match="is not a node name") as caught:
        node_names("," * 10**6 + text, "resource exclude")

    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300),
        ("5:30", 330),
        ("1:0:0", 3600),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:30:45", 217845),
        ("0-1", 3600),
    ],
)
def test_slurms_times_are_read(text: str, seconds: int) -> None:
    assert slurm_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "1-", "-1", "1:2:3:4", "1h", "²", "INFINITE", "1:2-3"])
def test_what_is_no_time_of_slurms_is_none(text: str) -> None:
    assert slurm_seconds(text) is None
