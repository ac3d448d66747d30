"""Preflight on a real Slurm cluster whose nodes have networks of their own, under real trouble."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from preflight_troubles import CASES, Case, Site, no_way_in, preflight, private_site, told

from tests.slurm_fixtures import install_slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="root alone makes network namespaces"),
]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    install_slurm()
    with private_site(own_networks=True) as site:
        yield site


def _marked(case: Case) -> Any:
    """All but one are left to `make test-all`: each takes half a minute."""
    return case if case.trouble is no_way_in else pytest.param(case, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES], ids=str)
def test_whoever_is_at_fault_is_named_and_nobody_else(site: Site, case: Case) -> None:
    verdict = preflight(site, case)

    assert case.is_right(verdict), told(verdict)
