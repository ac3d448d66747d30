"""What the collector asks once a host: NCCL RAS over TCP, GPUs by NVML; and what they lack."""

import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.records import GpuUse
from shakedown.monitor.collect import Target, collect_local, node, proc, ras

ANSWER = """NCCL version 2.28.3+cuda12.8 compiled with CUDA 12.8
Job summary
===========
#0-0 (cafe0123cafe0123) INCOMPLETE
  Missing communicator data from 1 job process
  The missing rank: 21
"""

# RAS is a thread of a rank, and here of this process.
RANK = Target("trainer-rank0", os.getpid(), rank=0)


class Listener:
    """A RAS listener on a free port; `answer` None keeps silent."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer
        self._server = socket.create_server(("127.0.0.1", 0), reuse_port=True)
        self._server.settimeout(0.1)
        self.port: int = self._server.getsockname()[1]
        self.asked = b""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self.asked and not self._over.is_set():
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            with connection:
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        self.asked = connection.recv(100)
        if self.asked:
            if self._answer is None:
                self._over.wait(30)
            else:
                connection.sendall(self._answer)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._server.close()


@pytest.fixture
def listener(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    found = Listener(request.param)
    monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{found.port}")
    yield found
    found.close()


@pytest.mark.parametrize("listener", [ANSWER.encode()], indirect=True)
def test_answer_of_ras_is_evidence_that_names_the_missing_rank(
    listener: Listener, tmp_path: Path
) -> None:
    report = collect_local([RANK], tmp_path, rounds=1)
    assert listener.asked == b"verbose status\n"
    assert report.node["nccl ras"] == "read"
    facts = build_facts(read_paths([tmp_path]).records)
    assert list(facts.ranks) == [0, 21]
    table = json.loads((tmp_path / f"collected-{report.host}.json").read_text())
    assert set(table["node"]) == {"nccl ras", "gpus", "slurm", "ray"}


@pytest.mark.parametrize("listener", [b"", None], indirect=True, ids=["empty", "silent"])
def test_listener_without_an_answer_is_missed_within_the_limit(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listener.port
    monkeypatch.setattr(ras, "ANSWER_SECONDS", 0.2)
    report = collect_local([RANK], tmp_path, rounds=1)
    assert report.node["nccl ras"] == "failed"
    assert any(row.startswith("nccl ras: ValueError: no answer on 12") for row in report.missed)


# Takes up connections on the port, too, and answers by its first argument.
OTHER_RANK = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[2])), reuse_port=True)
print("listens", flush=True)
while True:
    connection, _ = server.accept()
    if connection.recv(100):
        connection.sendall(sys.argv[1].encode())
    connection.close()
"""


@pytest.mark.parametrize("listener", [ANSWER.encode()], indirect=True)
def test_of_two_jobs_on_the_port_only_a_rank_of_the_own_one_is_asked(listener: Listener) -> None:
    command = [sys.executable, "-c", OTHER_RANK, "own", str(listener.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"listens\n"
        answers = {ras.query([rank.pid]) for _ in range(8)}
        rank.kill()
    assert answers == {("ras.txt", "own", "")}
    assert listener.asked == b""


@pytest.mark.parametrize("listener", [ANSWER.encode()], indirect=True)
def test_ras_of_another_job_alone_is_no_evidence(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ras, "TRIES", 2)
    with subprocess.Popen(["sleep", "60"]) as rank:
        report = collect_local([Target("trainer-rank0", rank.pid, rank=0)], tmp_path, rounds=1)
        rank.kill()
    assert report.node["nccl ras"] == (
        f"not there: no rank of this job takes up a connection on 127.0.0.1:{listener.port}"
    )
    assert list(build_facts(read_paths([tmp_path]).records).ranks) == [0]
    assert listener.asked == b""


@pytest.mark.parametrize("listener", [b"x" * 5000], indirect=True)
def test_endless_answer_is_cut_and_said_to_be(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listener.port
    monkeypatch.setattr(ras, "MAX_BYTES", 1000)
    _, text, missed = ras.query([os.getpid()])
    assert text == "x" * 1000
    assert "longer than 1000 bytes" in missed


def test_without_a_listener_nothing_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{port}")
    report = collect_local([RANK], tmp_path, rounds=1)
    assert report.node["nccl ras"].startswith("not there: nobody answers")


@pytest.mark.parametrize("address", ["nowhere", ":1", "h:0", "h:70000", "h:x"])
def test_bad_address_is_missed_with_what_was_expected(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", address)
    answer = node.ask("nccl ras", {"nccl ras": lambda: ras.query([])})
    assert answer.missed == f"ValueError: NCCL_RAS_ADDR={address}: expected HOST:PORT"


class NvmlError(Exception):
    """Stands for pynvml.NVMLError."""


def nvml(*, lost: bool = False, driver: bool = True) -> types.ModuleType:
    """A module with pynvml's names: two GPUs, of which the second may have fallen off the bus."""

    def rates(handle: int) -> types.SimpleNamespace:
        if lost and handle == 1:
            raise NvmlError("GPU is lost")
        return types.SimpleNamespace(gpu=100 - handle, memory=handle)

    def power(handle: int) -> int:
        if handle == 1:
            raise NvmlError("Not Supported")
        return 95_400

    def start() -> None:
        if not driver:
            raise NvmlError("Driver Not Loaded")

    names = {
        "NVMLError": NvmlError,
        "nvmlInit": start,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUtilizationRates": rates,
        "nvmlDeviceGetPowerUsage": power,
        "nvmlDeviceGetMemoryInfo": lambda _: types.SimpleNamespace(used=2**30),
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [types.SimpleNamespace(pid=41)],
    }
    module = types.ModuleType("pynvml")
    module.__dict__.update(names)
    return module


def test_gpus_are_written_a_row_each_and_read_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    name, text, missed = node.query_gpus()
    rows = json.loads(text)["gpus"]
    assert [row["utilisation_percent"] for row in rows] == [100, 99]
    assert [(row["memory_percent"], row["power_watts"]) for row in rows] == [(0, 95), (1, None)]
    assert rows[0]["pids"] == [41]
    assert missed == ""
    (tmp_path / f"n1-{name}").write_text(text)
    evidence = read_paths([tmp_path])
    assert evidence.skipped == []
    first = next(row for row in evidence.records if isinstance(row, GpuUse))
    assert (first.who.pid, first.who.host) == (41, socket.gethostname())
    assert first.place.text.endswith(": 100 % busy, memory 0 % busy, 95 W")


def test_a_lost_gpu_is_written_down_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(lost=True))
    _, text, missed = node.query_gpus()
    assert json.loads(text)["gpus"][1] == {"index": 1, "error": "GPU is lost"}
    assert missed == "GPU 1: GPU is lost"


@pytest.mark.parametrize(
    ("module", "said"), [(None, "not installed"), (nvml(driver=False), "Driver Not Loaded")]
)
def test_machine_without_gpus_is_noted(
    module: types.ModuleType | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    answer = node.ask("gpus")
    assert said in answer.said
    assert (answer.missed, answer.files) == ("", ())


def test_a_process_with_the_driver_loaded_is_one_that_uses_cuda(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(b"\0" * mmap.PAGESIZE)
    before = proc.uses_cuda(os.getpid())
    with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ):
        during = proc.uses_cuda(os.getpid())
    assert (before, during, proc.uses_cuda(2**30)) == (False, True, False)
