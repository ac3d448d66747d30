"""The probe's own promises: limits kept from outside, real checks, faults that change facts."""

import os
import time
from pathlib import Path
from types import MappingProxyType

import pytest

from shakedown.core.errors import UsageError
from shakedown.preflight.checks import CHECKS
from shakedown.preflight.checks.environment import local_environment
from shakedown.preflight.model import (
    Facts,
    InjectedFault,
    Member,
    NetworkRequest,
    ProbeRequest,
    parse_fault,
)
from shakedown.preflight.probe import run_checks


def request(tmp_path: Path, *faults: str, limit: float = 10.0, **more: object) -> ProbeRequest:
    base: dict[str, object] = {
        "addresses": {"n1": "127.0.0.1"},
        "out": str(tmp_path),
        "token": "t",
        "port_base": 16_000,
        "limit": limit,
        "faults": [InjectedFault(kind) for kind in faults],
    }
    return ProbeRequest(**{**base, **more})  # type: ignore[arg-type]


def forever(asked: ProbeRequest, node: str) -> Facts:
    time.sleep(600)
    return {}


def dies(asked: ProbeRequest, node: str) -> Facts:
    os._exit(7)


def raises(asked: ProbeRequest, node: str) -> Facts:
    raise OSError(5, "Input/output error")


def works(asked: ProbeRequest, node: str) -> Facts:
    return {"node": node}


def test_a_check_that_hangs_dies_or_raises_is_an_error_and_the_others_count(tmp_path: Path) -> None:
    checks = {"hangs": forever, "dies": dies, "raises": raises, "works": works}

    reports = run_checks(checks, request(tmp_path, limit=1.0), "n1")

    assert reports["hangs"].error == "no answer within 1 s"
    assert reports["dies"].error == "the check's process died"
    assert "Input/output error" in reports["raises"].error
    assert reports["works"].facts == {"node": "n1"}


def test_every_real_check_gives_facts_here(tmp_path: Path) -> None:
    reports = run_checks(CHECKS, request(tmp_path, paths=[str(tmp_path)]), "n1")

    assert {name: report.error for name, report in reports.items() if report.error} == {}


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("no_disk", "files"),
        ("low_shm", "shm"),
        ("low_limits", "limits"),
        ("gpu_missing", "gpus"),
        ("version_skew", "environment"),
        ("name_resolution", "names"),
        ("port_busy", "ports"),
        ("model_unreadable", "paths"),
        ("invisible_file", "visibility"),
    ],
)
def test_an_injected_fault_changes_the_checks_facts(tmp_path: Path, fault: str, check: str) -> None:
    (tmp_path / "model").write_text("x")
    asked = {"paths": [str(tmp_path / "model")], "limit": 1.0}
    healthy = CHECKS[check](request(tmp_path, **asked), "n1")  # type: ignore[arg-type]
    (tmp_path / ".probe-t" / "seen-n1").unlink(missing_ok=True)

    broken = CHECKS[check](request(tmp_path, fault, **asked), "n1")  # type: ignore[arg-type]

    steps = MappingProxyType({"steps": None, "free_gb": None})
    assert {**broken, **steps} != {**healthy, **steps}


def test_faults_hit_the_named_node_only(tmp_path: Path) -> None:
    asked = request(tmp_path, faults=[InjectedFault("low_shm", "n2")])

    assert CHECKS["shm"](asked, "n1")["free_mb"] != 1.0
    assert CHECKS["shm"](asked, "n2")["free_mb"] == 1.0


def test_secrets_are_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")

    variables = CHECKS["environment"](request(tmp_path), "n1")["variables"]

    assert variables["NCCL_DEBUG"] == "INFO"
    assert "hidden" not in str(variables)


def test_a_git_lfs_pointer_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")

    facts = CHECKS["paths"](request(tmp_path, paths=[str(tmp_path)]), "n1")

    assert "Git LFS pointer" in facts["paths"][str(tmp_path)]["error"]


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts = CHECKS["ports"](request(tmp_path, ports=[port]), "n1")

    assert list(facts["taken"]) == [str(port)]


@pytest.mark.parametrize("kind", ["no_disc", "", "low_shm:other"])
def test_unknown_faults_and_nodes_are_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="--fake-fault"):
        parse_fault(kind, ["n1"])


def test_requests_survive_the_command_line(tmp_path: Path) -> None:
    probe = request(tmp_path, "low_shm", paths=["/a b"])
    network = NetworkRequest(
        [Member("n1", "x", [1])], [[[0, 1]]], faults=[InjectedFault("gloo_dead")]
    )

    assert ProbeRequest.from_text(probe.to_text()).to_text() == probe.to_text()
    again = NetworkRequest.from_text(network.to_text())
    assert again.to_text() == network.to_text()
    assert (again.members[0].node, again.faults[0].kind) == ("n1", "gloo_dead")


def test_copies_that_setuptools_brings_along_are_no_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendored = tmp_path / "setuptools" / "_vendor"
    (vendored / "six-0.1.dist-info").mkdir(parents=True)
    (vendored / "six-0.1.dist-info" / "METADATA").write_text("Name: made-up-copy\nVersion: 0.1\n")
    before = local_environment()

    monkeypatch.syspath_prepend(str(vendored))
    after = local_environment()

    assert "made-up-copy" not in after["packages"]
    assert after["digest"] == before["digest"]
