"""The probe's own promises: limits kept from outside, real checks, faults that change facts."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from shakedown.cluster.nodes import free_port
from shakedown.core.errors import UsageError
from shakedown.preflight.check import Measure
from shakedown.preflight.checks import CHECKS, locks
from shakedown.preflight.checks.environment import local_environment
from shakedown.preflight.checks.files import marker_folder
from shakedown.preflight.checks.interfaces import gloo_choice, nccl_choice
from shakedown.preflight.checks.paths import sampled_blocks
from shakedown.preflight.checks.visibility import COMMAND, leave_file
from shakedown.preflight.datatypes import (
    DrillFault,
    Expectations,
    NodeFacts,
    NodeReport,
    ProbeRequest,
    WorkerRequest,
)
from shakedown.preflight.faults import FAULTS, parse_fault
from shakedown.preflight.judge import judge
from shakedown.preflight.probe import measures, run_checks

NODES = ["n1", "n2", "n3"]
# Those of the network workers and of the probe itself change no facts; where no GPU is wanted,
# torch and the driver are not asked.
MEASURED = [
    (kind, fault.check)
    for kind, fault in FAULTS.items()
    if fault.check and CHECKS[fault.check].wanted(Expectations(paths=["/"]))
]


def request(tmp_path: Path, *faults: str, limit: float = 10.0, **more: object) -> ProbeRequest:
    paths = more.pop("paths", [])
    base: dict[str, object] = {
        "addresses": {"n1": "127.0.0.1"},
        "out": str(tmp_path),
        "token": "t",
        "limit": limit,
        "want": Expectations(paths=paths),  # type: ignore[arg-type]
        "faults": [DrillFault(kind) for kind in faults],
    }
    return ProbeRequest(**{**base, **more})  # type: ignore[arg-type]


def measure(check: str) -> Measure:
    found = CHECKS[check].measure
    assert found is not None
    return found


def forever(asked: ProbeRequest, node: str) -> NodeFacts:
    time.sleep(600)
    return {}


def dies(asked: ProbeRequest, node: str) -> NodeFacts:
    os._exit(7)


def raises(asked: ProbeRequest, node: str) -> NodeFacts:
    raise OSError(5, "Input/output error")


def works(asked: ProbeRequest, node: str) -> NodeFacts:
    return {"node": node}


def test_a_check_that_hangs_dies_or_raises_is_an_error_and_the_others_count(tmp_path: Path) -> None:
    checks = {"hangs": forever, "dies": dies, "raises": raises, "works": works}

    reports = run_checks(checks, request(tmp_path, limit=1.0), "n1")

    assert reports["hangs"].error == "no answer within 1 s"
    assert reports["dies"].error == "the check's process died"
    assert "Input/output error" in reports["raises"].error
    assert reports["works"].facts == {"node": "n1"}


def test_every_real_check_gives_facts_here(tmp_path: Path) -> None:
    asked = request(tmp_path, paths=[str(tmp_path)])

    reports = run_checks(measures(asked.want), asked, "n1")

    assert {name: report.error for name, report in reports.items() if report.error} == {}


@pytest.mark.parametrize(("fault", "check"), MEASURED)
def test_an_injected_fault_is_found_by_its_check_and_by_no_other(
    tmp_path: Path, fault: str, check: str
) -> None:
    (tmp_path / "model").write_text("x")
    nodes = dict.fromkeys(NODES, "127.0.0.1")
    asked = {"paths": [str(tmp_path / "model")], "ports": [free_port("")]}
    healthy = request(tmp_path, limit=6.0, addresses=nodes, **asked)
    faulty = replace(healthy, faults=[DrillFault(fault, "n1")])
    others = {node: report(healthy) for node in NODES[1:]}

    # What differs between files of one name is told as another row: `same_files`.
    told = {"stale_model": "same_files"}.get(fault, check)
    before, after = (bad_checks(asked, others) for asked in (healthy, faulty))

    assert after - before == {told}


def bad_checks(asked: ProbeRequest, others: dict[str, NodeReport]) -> set[str]:
    found = judge(
        NODES, {"n1": report(asked), **others}, None, asked.want, command=local_environment()
    )
    return {finding.check for finding in found if finding.status not in ("pass", "skip")}


def report(asked: ProbeRequest) -> NodeReport:
    """What n1 measures, beside nodes that left their files."""
    folder = marker_folder(asked)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in (*NODES, COMMAND, "@tried-n2", "@tried-n3"):
        leave_file(folder, name, asked.token)
    now = time.time()
    return NodeReport("n1", run_checks(measures(asked.want), asked, "n1"), (now, now + 2.0))


def test_faults_hit_the_named_node_only(tmp_path: Path) -> None:
    asked = request(tmp_path, faults=[DrillFault("low_shm", "n2")])
    shm = measures(asked.want)["shm"]

    assert shm(asked, "n1")["free_mb"] != 1.0
    assert shm(asked, "n2")["free_mb"] == 1.0


def test_secrets_are_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")

    variables = measure("environment")(request(tmp_path), "n1")["variables"]

    assert variables["NCCL_DEBUG"] == "INFO"
    assert "hidden" not in str(variables)


def test_a_git_lfs_pointer_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")

    facts = measure("paths")(request(tmp_path, paths=[str(tmp_path)]), "n1")

    assert "Git LFS pointer" in facts["paths"][str(tmp_path)]["error"]


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts = measure("ports")(request(tmp_path, ports=[port]), "n1")

    assert list(facts["taken"]) == [str(port)]


@pytest.mark.parametrize("kind", ["no_disc", "", "low_shm:other"])
def test_unknown_faults_and_nodes_are_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="--fake-fault"):
        parse_fault(kind, ["n1"])


def test_requests_survive_the_command_line(tmp_path: Path) -> None:
    probe = request(tmp_path, "low_shm", paths=["/a b"])
    worker = WorkerRequest({"n1": "10.0.0.1"}, "t", 5.0, [DrillFault("gloo_dead")])

    assert ProbeRequest.from_text(probe.to_text()) == ProbeRequest.from_text(probe.to_text())
    assert ProbeRequest.from_text(probe.to_text()).want.paths == ["/a b"]
    assert WorkerRequest.from_text(worker.to_text()) == worker


def test_a_request_to_ten_thousand_nodes_fits_into_one_argument(tmp_path: Path) -> None:
    nodes = {
        f"gpu-r{n // 64:03d}-n{n % 64:02d}": f"10.{n // 250}.{n % 250}.7" for n in range(10**4)
    }

    text = request(tmp_path, addresses=nodes).to_text()

    assert len(text) < 128 * 1024


@pytest.mark.parametrize("text", ["", "{}", "abc", "@@@@"])
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        ProbeRequest.from_text(text)


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
    assert after["packages"] == before["packages"]


def test_blocks_are_sampled_from_the_first_byte_to_the_last() -> None:
    assert sampled_blocks(10) == [0]
    blocks = sampled_blocks(10**9)
    assert (len(blocks), blocks[0], blocks[-1] + 64 * 1024) == (16, 0, 10**9)


def test_files_of_equal_size_and_other_bytes_have_other_digests(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    asked = request(tmp_path, paths=[str(file)])
    digests = set()
    for byte in (b"a", b"b"):
        file.write_bytes(byte * 100_000)
        digests.add(measure("paths")(asked, "n1")["paths"][str(file)]["digest"])

    assert len(digests) == 2


def test_a_lock_that_the_first_node_holds_is_seen_by_the_second(tmp_path: Path) -> None:
    asked = request(tmp_path, addresses={"n1": "", "n2": ""}, limit=10.0)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda node: locks.measure(asked, node), ["n1", "n2"])

    assert first == second == {"failed": "", "taken": False, "unheld": False}


def test_a_lock_that_nobody_holds_any_more_is_not_judged(tmp_path: Path) -> None:
    asked = request(tmp_path, addresses={"n1": "", "n2": ""}, limit=0.5)
    locks.measure(asked, "n1")

    facts = locks.measure(asked, "n2")

    assert facts == {"failed": "", "taken": False, "unheld": True}
    assert locks.judge(facts, asked.want).status == "skip"


ETHERNET = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.1"], "down": []}


@pytest.mark.parametrize(
    ("own", "asked", "chosen"),
    [
        (["10.0.0.1"], "", "eth0"),
        (["127.0.1.1"], "", "lo"),
        (["10.0.0.1"], "docker0", "docker0"),
        (["10.0.0.1"], "ib9", ""),
    ],
)
def test_gloo_takes_the_interface_of_the_hosts_name(
    own: list[str], asked: str, chosen: str
) -> None:
    assert gloo_choice(ETHERNET, own, asked) == chosen


@pytest.mark.parametrize(
    ("more", "asked", "chosen"),
    [
        ({}, "", "eth0"),
        ({"ib0": ["10.1.0.1"]}, "", "ib0"),
        ({}, "eth", "eth0"),
        ({}, "=eth", ""),
        ({}, "=eth0", "eth0"),
        ({}, "^docker,lo", "eth0"),
        ({}, "ens", ""),
    ],
)
def test_nccl_takes_infiniband_then_what_is_no_bridge(
    more: dict[str, list[str]], asked: str, chosen: str
) -> None:
    assert nccl_choice({**ETHERNET, **more}, asked) == chosen
