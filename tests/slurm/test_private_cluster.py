"""The private cluster itself: start, refuse, stop, and nothing left behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import private_slurm
import pytest
from private_slurm import config, control, ports, processes

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm_cluster.py"
INSTALL = SCRIPT.with_name("install_system.sh")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, and whatever happens no cluster left in it."""
    path = Path(tempfile.mkdtemp(prefix="slurm-"))
    yield path
    if (path / "cluster.json").exists():
        private_slurm.stop(path)
    shutil.rmtree(path)


def cluster_command(*arguments: object) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def run(
    *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        cluster_command(*arguments),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.1)


def left_over(cluster: private_slurm.Cluster) -> list[processes.Process]:
    daemons = [process for process in cluster.processes if processes.is_alive(process)]
    return daemons + processes.of_cluster(cluster.plan.folder, cluster.plan.name)


@pytest.mark.slurm
@pytest.mark.usefixtures("slurm_programs")
class TestLifeOfACluster:
    def test_stop_ends_a_job_that_ignores_signals_and_left_its_session(self, folder: Path) -> None:
        cluster = private_slurm.start(folder, accounting="none", nodes=2)
        stubborn = "trap '' TERM HUP INT; setsid sleep 600 & touch up; sleep 600"
        subprocess.run(
            ["sbatch", "--chdir", folder, "--output", "job.out", "--wrap", stubborn],
            env={**os.environ, **cluster.environment},
            check=True,
            capture_output=True,
        )
        wait_for_file(folder / "up")
        names = {process.name for process in left_over(cluster)}

        private_slurm.stop(folder)

        assert "sleep" in names
        assert left_over(cluster) == []

    def test_job_ids_are_not_those_of_the_cluster_before(self, folder: Path) -> None:
        first = private_slurm.start(folder, accounting="none", nodes=1)
        private_slurm.stop(folder)

        second = private_slurm.start(folder, accounting="none", nodes=1)

        assert second.plan.first_job_id > first.plan.first_job_id

    def test_a_second_start_in_the_same_folder_is_refused(self, folder: Path) -> None:
        private_slurm.start(folder, accounting="none", nodes=1)

        done = run("start", folder, "--accounting", "none")

        assert done.returncode == 2
        assert "stop it first" in done.stderr
        assert private_slurm.status(folder).dead == []

    def test_two_clusters_run_side_by_side_and_listen_on_the_loopback_only(
        self, folder: Path, slurm_cluster: private_slurm.Cluster
    ) -> None:
        cluster = private_slurm.start(folder, accounting="none", nodes=1)

        health = private_slurm.status(folder)

        plan = cluster.plan
        mine = {plan.controller_port, *plan.node_ports}
        other = slurm_cluster.plan
        assert not mine & {other.controller_port, other.database_port, *other.node_ports}
        assert health.dead == []
        assert health.nodes == ["n1 idle gpu:4"]
        every = mine | {other.controller_port, other.database_port, *other.node_ports}
        assert listening_addresses(every - {plan.database_port}) == {"127.0.0.1"}

    def test_accounting_knows_the_jobs_that_ran(
        self, slurm_env: dict[str, str], tmp_path: Path
    ) -> None:
        submit = ["sbatch", "--parsable", "--wait", "--output", f"{tmp_path}/o", "--wrap", "true"]
        job_id = subprocess.run(
            submit, env=slurm_env, capture_output=True, text=True, check=True
        ).stdout.strip()

        seen = subprocess.run(
            ["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", job_id],
            env=slurm_env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

        assert seen.strip() == f"{job_id}|COMPLETED"

    def test_a_daemon_that_does_not_come_up_is_named_with_the_end_of_its_log(
        self, folder: Path, tmp_path: Path
    ) -> None:
        broken = tmp_path / "slurmd"
        broken.write_text("#!/bin/sh\necho the disk has run away\nexit 1\n")
        broken.chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

        done = run("start", folder, "--accounting", "none", environment=environment)

        assert done.returncode == 3
        assert "slurmd-n1 ended while starting" in done.stderr
        assert "the disk has run away" in done.stderr
        assert run("status", folder).returncode == 1
        assert processes.of_cluster(folder, "none") == []

    def test_a_daemon_is_killed_and_started_again(self, folder: Path) -> None:
        first = private_slurm.start(folder, accounting="none", nodes=1)

        killed = run("daemon", folder, "kill", "slurmctld")
        dead = private_slurm.status(folder).dead
        again = run("daemon", folder, "kill", "slurmctld")
        started = run("daemon", folder, "start", "slurmctld")

        assert (killed.returncode, started.returncode) == (0, 0), started.stderr
        assert dead == ["slurmctld"]
        assert (again.returncode, "dead already" in again.stderr) == (2, True)
        assert private_slurm.status(folder).dead == []
        assert private_slurm.load(folder).processes != first.processes

    def test_a_frozen_daemon_lives_and_does_not_answer(self, folder: Path) -> None:
        cluster = private_slurm.start(folder, accounting="none", nodes=1)
        ask = ["timeout", "2", "scontrol", "ping"]
        environment = {**os.environ, **cluster.environment}

        control.pause(folder, "slurmctld")
        frozen = subprocess.run(ask, env=environment, capture_output=True, check=False)
        control.resume(folder, "slurmctld")
        resumed = subprocess.run(ask, env=environment, capture_output=True, check=False)

        assert (frozen.returncode, resumed.returncode) == (124, 0)

    def test_a_lost_node_takes_its_own_jobs_along_and_no_other(self, folder: Path) -> None:
        cluster = private_slurm.start(folder, accounting="none", nodes=2)
        for node in ("n1", "n2"):
            work = f"trap '' TERM; setsid sleep 600 & touch {node}; wait"
            subprocess.run(
                ["sbatch", "-w", node, "--chdir", folder, "--output=/dev/null", "--wrap", work],
                env={**os.environ, **cluster.environment},
                check=True,
                capture_output=True,
            )
        wait_for_file(folder / "n1")
        wait_for_file(folder / "n2")

        control.lose(folder, "slurmd-n2")

        assert private_slurm.status(folder).dead == ["slurmd-n2"]
        assert processes.of_node(folder, cluster.plan.name, "n2") == []
        others = {process.name for process in processes.of_node(folder, cluster.plan.name, "n1")}
        assert {"slurmd", "slurmstepd", "sleep"} <= others

    @pytest.mark.parametrize(
        ("action", "name", "words"),
        [
            ("kill", "slurmd-n9", "there are munged, slurmctld, slurmd-n1"),
            ("start", "slurmctld", "runs already"),
            ("lose", "slurmctld", "expected a node's daemon"),
        ],
    )
    def test_a_wrong_request_for_a_daemon_is_a_usage_error(
        self, folder: Path, action: str, name: str, words: str
    ) -> None:
        private_slurm.start(folder, accounting="none", nodes=1)

        done = run("daemon", folder, action, name)

        assert done.returncode == 2
        assert words in done.stderr
        assert private_slurm.status(folder).dead == []

    def test_a_given_first_job_id_and_setting_hold(self, folder: Path) -> None:
        cluster = private_slurm.start(
            folder, accounting="none", nodes=1, first_job_id=700, settings=["MinJobAge=7"]
        )
        environment = {**os.environ, **cluster.environment}

        def ask(*command: str) -> str:
            return subprocess.check_output(command, env=environment, text=True)

        job_id = ask("sbatch", "--parsable", "--output=/dev/null", "--wrap=true").strip()
        settings = ask("scontrol", "show", "config")

        assert job_id == "700"
        assert re.search(r"MinJobAge += 7 sec", settings)

    def test_run_gives_the_commands_exit_code_and_stops_the_cluster(self, folder: Path) -> None:
        command = "srun hostname && cp cluster.json state.copy && exit 7"
        options = ("--accounting", "none", "--nodes", "1")

        done = run("run", folder, *options, "--", "sh", "-c", f"cd {folder}; {command}")

        assert done.returncode == 7, done.stderr
        assert done.stdout.strip() == socket.gethostname()
        assert run("status", folder).returncode == 1
        assert processes.of_cluster(folder, "none") == []

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_run_passes_a_signal_on_and_stops_the_cluster(
        self, folder: Path, number: signal.Signals
    ) -> None:
        command = f"trap 'touch {folder}/told; exit 5' INT TERM; touch {folder}/up; sleep 60 & wait"
        options = ("--accounting", "none", "--nodes", "1")
        wrapper = subprocess.Popen(
            cluster_command("run", *options, folder, "--", "sh", "-c", command)
        )
        wait_for_file(folder / "up")

        wrapper.send_signal(number)

        assert wrapper.wait(60) == 5
        assert (folder / "told").exists()
        assert processes.of_cluster(folder, "none") == []

    def test_a_port_in_use_is_refused_by_name(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]

            done = run("start", folder, "--base-port", port)

        assert done.returncode == 2
        assert f"port {port}" in done.stderr
        assert not (folder / "cluster.json").exists()


def listening_addresses(wanted: set[int]) -> set[str]:
    """Addresses on which these TCP ports are open, from the kernel's table."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]
    found = {int(port, 16): address for address, port in listening if int(port, 16) in wanted}
    assert found.keys() == wanted
    return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in found.values()}


def test_stop_of_a_folder_without_a_cluster_is_a_usage_error(tmp_path: Path) -> None:
    done = run("stop", tmp_path)

    assert done.returncode == 2
    assert "no cluster in" in done.stderr


def test_a_folder_with_other_things_in_it_is_not_used(folder: Path) -> None:
    (folder / "thesis.tex").touch()

    with pytest.raises(private_slurm.ClusterError, match="not an empty folder"):
        private_slurm.start(folder, accounting="none")

    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("x" * 90, {}, "too long for Unix sockets"),
        ("a b", {}, "cannot hold this path"),
        ("x", {"nodes": 0}, "nodes 0"),
        ("x", {"accounting": "cloud"}, "'cloud'"),
        ("x", {"cpus": 0}, "cpus 0"),
        ("x", {"first_job_id": 70_000_000}, "first job id 70000000"),
        ("x", {"settings": ["MinJobAge 2"]}, "'MinJobAge 2'"),
        ("x", {"settings": ["A=1\nB=2"]}, "expected Name=value"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_written(
    folder: Path, name: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(private_slurm.ClusterError, match=words) as caught:
        private_slurm.start(folder / name, **options)  # type: ignore[arg-type]

    assert caught.value.exit_code == 2
    assert list(folder.iterdir()) == []


def test_a_damaged_state_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"plan": 3')

    done = run("stop", tmp_path)

    assert done.returncode == 2
    assert "is damaged" in done.stderr


def test_probed_ports_avoid_one_that_is_taken() -> None:
    taken = ports.choose(1, 0)[0]
    with socket.create_server(("127.0.0.1", taken)):
        assert not ports.is_free(taken)
        assert taken not in ports.choose(2000, 0)


def test_the_first_job_id_grows_with_time_and_stays_below_slurms_limit() -> None:
    ids = [config.first_job_id(now) for now in (0.0, 1.8e9, 1.8e9 + 0.1, 4e9)]

    assert ids[2] == ids[1] + 2
    assert all(1 <= job_id < 67_043_328 for job_id in ids)


def test_the_install_check_is_quiet_when_nothing_is_missing(slurm_programs: None) -> None:
    done = subprocess.run([INSTALL, "--check"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_install_check_names_what_is_missing(bare_path: dict[str, str]) -> None:
    done = subprocess.run(
        ["/bin/bash", INSTALL, "--check"],
        env=bare_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 3
    assert "missing: slurm-client\n" in done.stdout
    assert "missing: mariadb-client-core\n" in done.stdout


def test_a_user_who_may_not_install_is_told_the_command(bare_path: dict[str, str]) -> None:
    (Path(bare_path["PATH"]) / "apt-get").symlink_to("/usr/bin/apt-get")
    (Path(bare_path["PATH"]) / "id").write_text("#!/bin/bash\necho 1000\n")
    (Path(bare_path["PATH"]) / "id").chmod(0o755)

    done = subprocess.run(
        ["/bin/bash", INSTALL], env=bare_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 3
    assert "apt-get update && apt-get install -y --no-install-recommends" in done.stderr
    assert "slurm-client" in done.stderr


def test_an_unknown_package_group_is_a_usage_error() -> None:
    done = subprocess.run([INSTALL, "kubernetes"], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "kubernetes" in done.stderr


@pytest.fixture
def bare_path(tmp_path: Path) -> dict[str, str]:
    """An environment in which the programs of /usr/bin are not there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    return {"PATH": str(programs)}
