"""The choice of a partition: the peer's file, the peer's scores; nothing hostile gets through."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit.partitions import (
    Partition,
    choose,
    config_file,
    parse,
    read,
    score,
)
from snakemake_executor_plugin_submitit.request import JobRequest, request

PEER_FILE = """
partitions:
  short:
    max_runtime: 120
    max_mem_mb: 8000
    max_threads: 8
  long:
    max_runtime: "10-00:00:00"
    max_mem_mb: 64000
    max_threads: 64
    available_constraints: [ib]
  gpu:
    max_runtime: 2d12h
    max_mem_mb: 8000
    max_threads: 8
    max_gpu: 4
    max_cpus_per_gpu: 8
    available_gpu_models: [a100, h200]
  mpi:
    max_nodes: 16
    max_tasks: 512
    supports_mpi: true
    max_mpi_tasks: 512
  away:
    cluster: other
    max_threads: 64
"""


@pytest.fixture
def peer_file(tmp_path: Path) -> tuple[Partition, ...]:
    path = tmp_path / "partitions.yaml"
    path.write_text(PEER_FILE)
    return read(path)


def asked(threads: int = 1, /, **resources: Any) -> JobRequest:
    return request(resources, threads)


def one(**keys: Any) -> Partition:
    (partition,) = parse({"partitions": {"p": keys}}, "file")
    return partition


@pytest.mark.parametrize(
    ("job", "name"),
    [
        (asked(4, runtime=60, mem_mb=4000), "short"),
        (asked(8, runtime=120, mem_mb=8000), "short"),
        (asked(4, runtime=6000, mem_mb=4000), "long"),
        (asked(16, runtime=60), "long"),
        (asked(4, runtime=60, gpu=1), "gpu"),
        # The rule of shares: even for a job without GPUs the smaller partition may win.
        (asked(4, runtime=600, mem_mb=4000), "gpu"),
        (asked(4, gpu=2, gpu_model="a100"), "gpu"),
        (asked(4, gres="gpu:h200:4"), "gpu"),
        (asked(1, mpi="srun", tasks=256, nodes=8), "mpi"),
        (asked(1, tasks=512, mpi="srun"), "mpi"),
        (asked(4, constraint="ib", runtime=600), "long"),
        (asked(4, runtime=60, cluster="other"), "away"),
    ],
)
def test_the_best_partition_is_chosen(
    peer_file: tuple[Partition, ...], job: JobRequest, name: str
) -> None:
    assert choose(peer_file, job) == (name, "")


def test_where_none_fits_each_says_why(peer_file: tuple[Partition, ...]) -> None:
    name, reasons = choose(peer_file, asked(100, runtime=60, gpu=1, gpu_model="v100"))

    assert name == ""
    assert "short: threads 100 is above its 8" in reasons
    assert "gpu: no gpu_model v100" in reasons
    assert "away: it is on cluster other" in reasons
    assert "mpi: gpu 1 is above its 0" in reasons


@pytest.mark.parametrize(
    ("partition", "job", "value"),
    [
        # The sum of what is asked for, each as a share of its limit.
        (one(max_mem_mb=4000, max_runtime=100), asked(mem_mb=1000, runtime=50), 0.75),
        (one(max_mem_mb=4000), asked(runtime=10**6), 0.0),
        (one(max_mem_mb_per_cpu=100), asked(mem_mb_per_cpu=50), 0.5),
        (one(max_nodes=4, max_tasks=8, max_tasks_per_node=2), asked(nodes=2, tasks=2), 0.75),
        (one(max_mpi_tasks=10), asked(mpi_tasks=5), 0.5),
        # Threads count for themselves and as CPUs a task.
        (one(max_threads=8), asked(4), 1.0),
        (one(max_cpus_per_task=8), asked(4), 0.5),
        (one(max_threads=8), asked(2, cpus_per_task=4), 0.75),
        (one(max_threads=8), asked(1, threads=4), 1.0),
        (one(max_cpus_per_task=8), asked(4, cpus_per_task=-1), 0.0),
        (one(max_cpus_per_task=8), asked(4, cpus_per_task=0), 0.125),
        # GPUs; a job without them is better off elsewhere.
        (one(max_gpu=4), asked(gpu=2), 0.5),
        (one(max_gpu=4), asked(gres="nvme:1,gpu:2"), 0.5),
        (one(max_gpu=4), asked(gpu_model="a100"), 0.25),
        (one(max_gpu=4), asked(), -1.0),
        (one(max_gpu=4, max_cpus_per_gpu=8), asked(4, gpu=2, cpus_per_gpu=4), 1.0),
        (one(max_gpu=4, max_cpus_per_task=8), asked(4, gpu=2, cpus_per_gpu=4), 0.5),
        (one(max_gpu=4, available_gpu_models=["a100"]), asked(gpu=4), 1.0),
        (one(available_constraints=["ib", "avx"]), asked(constraint="avx, ib"), 0.0),
    ],
)
def test_a_score_is_the_sum_of_shares(partition: Partition, job: JobRequest, value: float) -> None:
    assert score(partition, job) == pytest.approx(value)


@pytest.mark.parametrize(
    ("partition", "job"),
    [
        (one(max_mem_mb=4000), asked(mem_mb=4001)),
        (one(max_runtime=60), asked(runtime=61)),
        (one(max_threads=8), asked(9)),
        (one(max_threads=8), asked(1, cpus_per_task=9)),
        (one(max_cpus_per_task=8), asked(9)),
        (one(max_nodes=1), asked(nodes=2)),
        (one(max_tasks=1), asked(tasks=2)),
        (one(), asked(gpu=1)),
        (one(max_gpu=4), asked(gpu=5)),
        (one(max_gpu=4, max_cpus_per_gpu=2), asked(gpu=1, cpus_per_gpu=3)),
        (one(max_gpu=4, available_gpu_models=["a100"]), asked(gpu=1, gpu_model="h200")),
        (one(supports_mpi=False), asked(mpi="srun", tasks=2)),
        (one(available_constraints=["ib"]), asked(constraint="ib,avx")),
        (one(cluster="other"), asked()),
        (one(), asked(clusters="other")),
        (one(slurm_cluster="third"), asked(slurm_cluster="other")),
    ],
)
def test_a_partition_that_is_too_small_or_elsewhere_does_not_fit(
    partition: Partition, job: JobRequest
) -> None:
    assert isinstance(score(partition, job), str)


def test_of_equal_partitions_the_first_is_chosen() -> None:
    partitions = parse({"partitions": {"b": {}, "a": None, 7: {}}}, "file")

    assert choose(partitions, asked()) == ("b", "")
    assert [partition.name for partition in partitions] == ["b", "a", "7"]


@pytest.mark.parametrize(
    ("written", "minutes"),
    [
        (120, 120),
        (120.5, 121),
        ("120", 120),
        ("6d", 8640),
        ("12h", 720),
        ("30m", 30),
        ("90s", 2),
        ("2d12h30m", 3630),
        ("1.5 h", 90),
        ("1:30:45", 91),
        ("12:30", 750),
        ("2-12", 3600),
        ("2-12:30", 3630),
        ("2-12:30:45", 3631),
        ("UNLIMITED", float("inf")),
        (float("inf"), float("inf")),
    ],
)
def test_a_longest_runtime_has_many_forms(written: Any, minutes: float) -> None:
    assert one(max_runtime=written).limit("runtime") == minutes


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "expected a mapping `partitions:`"),
        ([], "expected a mapping `partitions:`"),
        ({"main": {}}, "expected a mapping `partitions:`"),
        ({"partitions": ["main"]}, "expected a mapping `partitions:`"),
        ({"partitions": {}}, "expected a mapping `partitions:`"),
        ({"partitions": {"": {}}}, "expected a partition's name"),
        ({"partitions": {"a b": {}}}, "expected a partition's name"),
        ({"partitions": {"a\n#SBATCH --x": {}}}, "expected a partition's name"),
        ({"partitions": {True: {}}}, "expected a partition's name"),
        ({"partitions": {"a": 3}}, "partition 'a': expected a mapping of limits"),
        ({"partitions": {"a": {"max_runtim": 3}}}, "did you mean 'max_runtime'?"),
        ({"partitions": {"a": {7: 3}}}, "unknown key 7"),
        ({"partitions": {"a": {"max_runtime": "soon"}}}, "max_runtime: 'soon' is not a time"),
        ({"partitions": {"a": {"max_runtime": True}}}, "is not a time"),
        ({"partitions": {"a": {"max_runtime": -1}}}, "is not a time"),
        ({"partitions": {"a": {"max_mem_mb": "4G"}}}, "max_mem_mb: '4G' is not a number"),
        ({"partitions": {"a": {"max_mem_mb": -1}}}, "is not a number"),
        ({"partitions": {"a": {"max_mem_mb": True}}}, "is not a number"),
        ({"partitions": {"a": {"max_mem_mb": float("nan")}}}, "is not a number"),
        ({"partitions": {"a": {"max_mem_mb": 10**400}}}, "is not a number"),
        ({"partitions": {"a": {"max_runtime": 10**400}}}, "is not a time"),
        ({"partitions": {"a": {"supports_mpi": "no"}}}, "supports_mpi: expected true or false"),
        ({"partitions": {"a": {"available_gpu_models": {}}}}, "expected a list of names"),
        ({"partitions": {"a": {"available_constraints": [[]]}}}, "expected a list of names"),
        ({"partitions": {"a": {"cluster": 1.5}}}, "expected a list of names"),
    ],
)
def test_what_is_no_file_of_partitions_is_named(content: Any, words: str) -> None:
    with pytest.raises(WorkflowError) as caught:
        parse(content, "file.yaml")

    assert words in str(caught.value)
    assert "file.yaml" in str(caught.value)
    assert len(str(caught.value)) < 600


def aliases(_: Path) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    return "\n".join([*lines, "partitions: {p: {max_gpu: *a29}}"])


def merges(_: Path) -> str:
    lines = ["a0: &a0 {k: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 60)]
    return "\n".join([*lines, "partitions: {p: *a59}"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (merges, "more than 20000 keys and values"),
        (lambda _: "a: &a {<<: &b {<<: *a}}\npartitions: *a", "is not YAML"),
        (lambda _: "partitions: " + "[1, " * 15_000, "is not YAML: it is nested deeper than 20"),
        (lambda _: "partitions: [" + "1, " * 30_000 + "]", "more than 20000 keys and values"),
        (lambda _: "partitions: 1" + ":1" * 500_000, "a number has more than 100 characters"),
        (lambda _: "partitions: {", "is not YAML"),
        (lambda _: "partitions: " + "[" * 20000, "is not YAML"),
        (lambda _: "partitions: {a: {max_gpu: " + "9" * 5000 + "}}", "a number has"),
        (lambda _: "partitions: !!python/object/apply:os.system [id]", "is not YAML"),
        (lambda _: "a: " + "x" * (1 << 20), "more than 1048576 characters"),
        (aliases, "is not a number"),
    ],
)
def test_a_hostile_file_is_refused_in_few_words(
    tmp_path: Path, text: Callable[[Path], str], words: str
) -> None:
    path = tmp_path / "partitions.yaml"
    path.write_text(text(path))

    with pytest.raises(WorkflowError) as caught:
        read(path)

    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")

    for name in ("missing", "binary"):
        with pytest.raises(WorkflowError, match=f"cannot read the partitions' file .*{name}"):
            read(tmp_path / name)


def test_the_setting_outranks_the_variable() -> None:
    variable = {"SNAKEMAKE_SLURM_PARTITIONS": "/etc/partitions.yaml"}

    assert config_file("mine.yaml", variable) == Path("mine.yaml")
    assert config_file("", variable) == Path("/etc/partitions.yaml")
    assert config_file("", {}) is None
