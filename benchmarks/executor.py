"""Our Slurm executor against Snakemake's official one, on one private cluster, in one run.

    python benchmarks/executor.py [--sizes 100 1000] [--only ours|peer] [--out FILE]

The workflow is prep -> parts -> gather: 1 + (size - 2) + 1 jobs. For each executor: wall seconds,
memory, and how often which Slurm program was called, by the submitting Snakemake and, apart,
inside the jobs. Programs are counted by wrappers that come first in PATH; the controller's own
count of requests (sdiag) is beside it. A run counts only when every job ran once and the gathered
file is right. The peer is installed into a temporary folder that only its own runs can see; from
these our plugin is hidden.
"""

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from _slurm import PROGRAMS, Cluster, environment, install_peer, private_cluster, real, surroundings

SNAKEFILE = """
rule gather:
    input: expand("part/{i}.txt", i=range(config["parts"]))
    output: "all.txt"
    shell: "echo gather >> ran.txt; cat {input} > {output}"
rule part:
    input: "seed.txt"
    output: "part/{i}.txt"
    shell: "echo part {wildcards.i} >> ran.txt; sleep 0.2; echo {wildcards.i} > {output}"
rule prep:
    output: "seed.txt"
    shell: "echo prep >> ran.txt; echo seed > {output}"
"""

OPTIONS = {
    "ours": ["--executor", "submitit"],
    "peer": [
        *("--executor", "slurm"),
        # Seconds to its first look; its default is 40. Each look that finds nothing new adds 10.
        *("--slurm-init-seconds-before-status-checks", "2"),
    ],
}


@dataclass(frozen=True)
class Run:
    """One measured run; `requests` are the controller's own count, by message type.

    `fault` is empty when every job ran once and the gathered file is right. `cpu_s` is that of
    the client and the programs it started.
    """

    tool: str
    jobs: int
    wall_s: float
    client_calls: dict[str, int]
    job_calls: dict[str, int]
    requests: dict[str, int]
    peak_mb: float
    cpu_s: float
    fault: str


def main() -> int:
    arguments = _parser().parse_args()
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        print(f"not on PATH: {', '.join(missing)}; run scripts/install_system.sh", file=sys.stderr)
        return 3
    if min(arguments.sizes) < 3:
        print(f"--sizes {arguments.sizes}: expected at least 3 jobs", file=sys.stderr)
        return 2
    # Unwind on SIGTERM too: the cluster must not outlive this program.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    runs = measure(arguments, folder)
    out = arguments.out or folder.with_suffix(".json")
    cluster = {"nodes": arguments.nodes, "cpus_per_node": arguments.cpus_per_node}
    body = {**surroundings(), "cluster": cluster, "runs": [asdict(run) for run in runs]}
    out.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    print(table(runs), *ratios(runs), f"written: {out}", sep="\n")
    if any(run.fault for run in runs):
        print(f"left for a look: {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def measure(arguments: argparse.Namespace, folder: Path) -> list[Run]:
    """Every size with every executor; stops after a run that went wrong."""
    tools = [arguments.only] if arguments.only else list(OPTIONS)
    peer = install_peer(folder / "peer") if "peer" in tools else None
    runs: list[Run] = []
    with private_cluster(folder, arguments.nodes, arguments.cpus_per_node) as cluster:
        for size in arguments.sizes:
            for tool in tools:
                visible = peer if tool == "peer" else None
                run = run_workflow(tool, size, folder / f"{tool}-{size}", cluster, visible)
                runs.append(run)
                print(f"{tool}, {size} jobs: {run.wall_s:.1f} s", file=sys.stderr, flush=True)
                if run.fault:
                    return runs
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", nargs="+", type=int, default=[100], metavar="JOBS", help="jobs of each workflow")
    add("--only", choices=list(OPTIONS), help="run one executor alone")
    add("--nodes", type=int, default=4, help="nodes of the private cluster (4)")
    add("--cpus-per-node", type=int, default=2, help="jobs that a node runs at once (2)")
    add("--out", type=Path, metavar="FILE", help="JSON of all figures")
    return parser


def run_workflow(tool: str, jobs: int, folder: Path, cluster: Cluster, peer: Path | None) -> Run:
    """One workflow from an empty folder, measured and checked."""
    folder.mkdir()
    (folder / "Snakefile").write_text(SNAKEFILE, encoding="utf-8")
    cluster.log.write_text("", encoding="utf-8")
    variables = environment(cluster, peer)
    subprocess.run([real("sdiag"), "--reset"], env=variables, check=True, capture_output=True)
    began = time.monotonic()
    code, usage = _measured(command(tool, jobs), folder, variables, seconds=120 + 6 * jobs)
    wall = time.monotonic() - began
    sdiag = subprocess.run([real("sdiag")], env=variables, check=True, capture_output=True)
    calls = count_calls(cluster.log.read_text(encoding="utf-8").splitlines())
    return Run(
        tool=tool,
        jobs=jobs,
        wall_s=round(wall, 1),
        client_calls=calls["client"],
        job_calls=calls["job"],
        requests=count_requests(sdiag.stdout.decode()),
        peak_mb=round(usage.ru_maxrss / 1024, 1),
        cpu_s=round(usage.ru_utime + usage.ru_stime, 1),
        fault=f"exit code {code}, see {folder}/out.txt" if code else fault(folder, jobs),
    )


def command(tool: str, jobs: int) -> list[str]:
    """Snakemake's command line; all but the executor's own options are equal."""
    return [
        *(sys.executable, "-m", "snakemake", "--jobs", str(jobs), *OPTIONS[tool]),
        *("--default-resources", "runtime=10", "mem_mb=200", "slurm_partition=main"),
        # Snakemake's own limit is 100 jobs in a second.
        *("--max-jobs-per-timespan", f"{jobs}/1s"),
        *("--config", f"parts={jobs - 2}"),
    ]


def _measured(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], *, seconds: float
) -> tuple[int, resource.struct_rusage]:
    """Exit code and resources; after `seconds` it is told to end, which cancels its jobs."""
    with (folder / "out.txt").open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=dict(variables), stdout=out, stderr=subprocess.STDOUT
        )
    signal.signal(signal.SIGALRM, lambda _number, _frame: process.terminate())
    signal.alarm(int(seconds))
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.terminate()
        process.wait(60)
        raise
    finally:
        signal.alarm(0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage


def fault(folder: Path, jobs: int) -> str:
    """What is wrong with a workflow that ended well; empty when nothing is."""
    numbers = [str(number) for number in range(jobs - 2)]
    if (folder / "all.txt").read_text(encoding="utf-8").split() != numbers:
        return "the gathered file is wrong"
    ran = Counter((folder / "ran.txt").read_text(encoding="utf-8").splitlines())
    expected = Counter(["prep", "gather", *(f"part {number}" for number in numbers)])
    return "" if ran == expected else f"not every job ran once: {ran - expected or expected - ran}"


def count_calls(lines: Iterable[str]) -> dict[str, dict[str, int]]:
    """Calls by place (`client`, `job`) and program, from the wrappers' log."""
    calls = Counter(tuple(line.split()) for line in lines)
    return {
        place: {program: calls[place, program] for program in PROGRAMS if calls[place, program]}
        for place in ("client", "job")
    }


def count_requests(sdiag: str) -> dict[str, int]:
    """Requests that the controller served since its reset, by message type."""
    rows = re.findall(r"^\s*([A-Z][A-Z0-9_]+)\s*\(\s*\d+\)\s+count:(\d+)", sdiag, re.MULTILINE)
    return {name: int(count) for name, count in rows}


def table(runs: Sequence[Run]) -> str:
    """A Markdown table; calls in the order of their number."""
    head = ["jobs", "executor", "wall s", "client calls", "calls inside the jobs"]
    head += ["requests", "peak MB", "CPU s", "right"]
    rows = [head, ["---"] * len(head)]
    for run in runs:
        requests = sum(run.requests.values())
        rows.append(
            [str(run.jobs), run.tool, f"{run.wall_s:.1f}"]
            + [_calls(run.client_calls), _calls(run.job_calls), str(requests)]
            + [f"{run.peak_mb:.0f}", f"{run.cpu_s:.1f}", run.fault or "yes"]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _calls(calls: Mapping[str, int]) -> str:
    ordered = sorted(calls.items(), key=lambda item: -item[1])
    single = ", ".join(f"{name} {number}" for name, number in ordered)
    return f"{sum(calls.values())} ({single})" if calls else "0"


def ratios(runs: Sequence[Run]) -> list[str]:
    """One line for each size that both executors ran."""
    walls = {(run.tool, run.jobs): run.wall_s for run in runs}
    sizes = dict.fromkeys(run.jobs for run in runs)
    return [
        f"{size} jobs: ours takes {walls['ours', size] / walls['peer', size]:.2f}"
        " of the peer's time"
        for size in sizes
        if ("ours", size) in walls and ("peer", size) in walls
    ]


if __name__ == "__main__":
    sys.exit(main())
