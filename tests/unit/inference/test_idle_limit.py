"""Idle limits, records and addresses of servers."""

import os
import socket
import time
from pathlib import Path

import pytest

from shakedown.cluster.nodes import non_ephemeral_port
from shakedown.core.errors import LaunchError, UsageError
from shakedown.core.paths import ServerPaths
from shakedown.inference.daemon import own_address, port_fault
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import (
    ServerOrder,
    SlurmOptions,
    order_of,
    read_endpoint,
    with_model,
)
from shakedown.inference.idle_limit import IdleLimit, IdleTimer
from shakedown.inference.server import sbatch_options


def test_idle_time_starts_anew_by_use_and_not_by_the_clock(tmp_path: Path) -> None:
    timer = IdleTimer(tmp_path / "lease")
    timer.reset()
    watch = IdleLimit(tmp_path / "lease", seconds=0.0)
    assert watch.reached()

    # A file server an hour behind: only the change counts.
    os.utime(tmp_path / "lease", (1, 1))

    assert IdleLimit(tmp_path / "lease", seconds=100.0).idle() < 100.0
    watch.idle()
    time.sleep(0.5)
    assert watch.idle() >= 0.5
    timer.reset()
    assert watch.idle() < 0.5


def test_use_that_cannot_be_noted_says_where(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="cannot note a use of the server"):
        IdleTimer(tmp_path / "missing" / "lease").reset()


def test_order_survives_its_text() -> None:
    spec = LaunchSpec("org/model", extra_args=("--a", "b"), prefix=("nice",))
    order = ServerOrder("p", "vllm", spec, slurm=SlurmOptions("main", extra=("--mem=4G",)))

    assert order_of(order.to_text()) == order


def test_folder_of_a_model_is_told_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "policy").mkdir(parents=True)
    (tmp_path / "models" / "policy" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "models")

    def model(given: str) -> str:
        return with_model(ServerOrder("p", "vllm", LaunchSpec(given))).spec.model

    assert model("policy") == model("./policy") == str(tmp_path / "models" / "policy")
    assert model("org/policy") == "org/policy"
    with pytest.raises(UsageError, match=r"\./none|none does not exist"):
        model("./none")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": "other"}', '{"schema": "shakedown/endpoint/1"}']
)
def test_file_that_is_no_endpoint_is_bad_input(tmp_path: Path, text: str) -> None:
    (tmp_path / "endpoint.json").write_text(text)

    with pytest.raises(UsageError, match=r"endpoint\.json|endpoint"):
        read_endpoint(tmp_path)


def test_missing_endpoint_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shakedown serve start"):
        read_endpoint(tmp_path / "endpoint.json")


def test_port_in_use_has_a_reason_and_is_not_chosen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert port_fault("127.0.0.1", taken.getsockname()[1]) == "Address already in use"

    assert port_fault("127.0.0.1", non_ephemeral_port("127.0.0.1")) is None


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"no free port on 198\.51\.100\.7"):
        non_ephemeral_port("198.51.100.7")


def test_local_server_is_for_this_machine_alone() -> None:
    assert own_address("local") == "127.0.0.1"


def test_sbatch_is_asked_for_what_was_given(tmp_path: Path) -> None:
    options = SlurmOptions(
        "gpu",
        "team",
        gpus=2,
        cpus=8,
        time_limit="4:00:00",
        exclude="n7,n9",
        gpu_model="h200",
        extra=("--mem=64G",),
    )

    found = sbatch_options(ServerPaths(tmp_path), options)

    assert {"--partition=gpu", "--account=team", "--gres=gpu:h200:2"} <= set(found)
    assert {"--cpus-per-task=8", "--time=4:00:00", "--nodes=1", "--exclude=n7,n9"} <= set(found)
    assert found[-1] == "--mem=64G"  # the user's own win
    plain = sbatch_options(ServerPaths(tmp_path), SlurmOptions())
    assert not [word for word in plain if word.startswith(("--partition", "--gres", "--time"))]
