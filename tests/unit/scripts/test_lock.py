"""scripts/lock.py: which files of a package a lock takes, and on which machines it is installed."""

import pytest
from lock import MACHINES, PYTHONS, fits, simple_marker


@pytest.mark.parametrize(
    ("wheel", "taken"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", True),
        ("a-1-py3-none-manylinux1_x86_64.whl", True),
        ("a-1-cp314-cp314-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp312-cp312-win_amd64.whl", False),
        ("a-1-cp312-cp312-macosx_11_0_arm64.whl", False),
        ("a-1.whl", False),
    ],
)
def test_wheels_are_those_that_pip_takes_on_linux_with_a_python_of_the_lock(
    wheel: str, taken: bool
) -> None:
    assert fits(wheel) is taken


@pytest.mark.parametrize(
    ("marker", "short"),
    [
        ("", ""),
        ("sys_platform == 'linux' and python_full_version < '4'", ""),
        (
            "platform_machine == 'x86_64' and python_version < '4'",
            "platform_machine == 'x86_64'",
        ),
        ("python_full_version < '3.12'", "python_version == '3.11'"),
        (
            "python_full_version >= '3.12'",
            "python_version == '3.12' or python_version == '3.13'",
        ),
        (
            "python_full_version >= '3.12' and platform_machine == 'x86_64'",
            "(python_version == '3.12' or python_version == '3.13')"
            " and platform_machine == 'x86_64'",
        ),
    ],
)
def test_marker_is_cut_to_what_tells_the_machines_of_the_lock_apart(
    marker: str, short: str
) -> None:
    assert (PYTHONS, MACHINES) == (("3.11", "3.12", "3.13"), ("x86_64", "aarch64"))
    assert simple_marker(marker) == short
