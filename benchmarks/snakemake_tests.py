"""Snakemake's own test cases on one private Slurm cluster each, ours and the official executor.

    python benchmarks/snakemake_tests.py [--only ours|peer] [--tests NAME ...] [--out FILE]

The tests come from Snakemake's sdist of the installed version, unchanged. First all of them run
with the local executor. A test is a candidate when it passes there, has started a job by the
executor that its caller chooses (and by no other), and is small: at most 12 jobs in 15 seconds.
The candidates then run with both executors, each in a process and on a cluster of its own. Exit
code 1: ours fails a test that the peer passes; 3: Slurm, pip or the sdist is missing.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from _slurm import PROGRAMS, Cluster, environment, install_peer, private_cluster, surroundings

PLUGIN = Path(__file__).with_name("_snakemake_tests_plugin.py")
NAMES = {"ours": "submitit", "peer": "slurm"}
# A candidate's size, with the local executor.
MOST_JOBS = 12
MOST_SECONDS = 15.0
# Executions that run nothing, so that every executor's tests may have them.
_IDLE = {"dryrun", "touch"}
# Each node claims more than this machine has, for tests of many threads.
_CPUS = 128
_LAST_LINES = 20
_REASON_LENGTH = 100
# What says most about a failure, in a test's output: why a job was not submitted, what the test
# itself found wrong, any other error, a command that failed.
_REASONS = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"^ *message: (?!None|Error in group|(?:Slurm |SLURM-)job)(.+)",
        r"^AssertionError: (?!expected (?:successful|error))(.+)",
        r"^[ |]*(?:\w+\.)*(\w+(?:Error|Exception): (?!At least one job|CalledProcess).+)",
        r"^[ |]*(Command .+)",
    )
]

# Slurm's task affinity shows a job its own CPUs; on this cluster it is told them.
AFFINITY = """
import os
if "SLURM_CPUS_ON_NODE" in os.environ:
    import snakemake.utils
    snakemake.utils.available_cpu_count = lambda: int(os.environ["SLURM_CPUS_ON_NODE"])
"""


@dataclass(frozen=True)
class Result:
    """One test with one executor.

    `outcome` is passed, failed, skipped or timeout. `executors` are those that its workflows came
    to; `jobs` were started by them. `submissions` counts calls of sbatch; `left` names the jobs in
    the queue when the test had ended. For a test that did not pass: `reason` in a few words, and
    the last `lines` of its output.
    """

    test: str
    tool: str
    outcome: str
    seconds: float
    executors: list[str]
    jobs: int
    submissions: int
    left: list[str]
    reason: str = ""
    lines: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


class MissingError(Exception):
    """Something that this benchmark needs is not there; the message says what, and what to do."""


def main() -> int:
    arguments = _parser().parse_args()
    # Unwind on SIGTERM too: the clusters must not outlive this program.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        results = measure(arguments, folder)
    except MissingError as error:
        print(error, file=sys.stderr)
        shutil.rmtree(folder)
        return 3
    out = arguments.out or folder.with_suffix(".json")
    body = {**surroundings(), "results": [asdict(result) for result in results]}
    out.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    print(counts(results), "", table(results), "", f"written: {out}", sep="\n")
    if all(result.passed for result in results):
        shutil.rmtree(folder)
    else:
        print(f"left for a look: {folder}", file=sys.stderr)
    return 1 if worse(results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", choices=list(NAMES), help="run one executor alone")
    add("--tests", nargs="+", metavar="NAME", help="these of tests/tests.py; all, if not given")
    add("--limit", type=float, default=180, metavar="SECONDS", help="of one test (180)")
    add("--out", type=Path, metavar="FILE", help="JSON of every result")
    return parser


def measure(arguments: argparse.Namespace, folder: Path) -> list[Result]:
    """Every candidate with every executor.

    Raises:
        MissingError: Slurm, the sdist or the peer cannot be had.
    """
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise MissingError(f"not on PATH: {', '.join(missing)}; run scripts/install_system.sh")
    tools = [arguments.only] if arguments.only else list(NAMES)
    sdist = fetch(folder)
    with ExitStack() as stack:
        try:
            peer = install_peer(folder / "installed") if "peer" in tools else None
            clusters = {tool: stack.enter_context(_cluster(folder / tool)) for tool in tools}
        except subprocess.CalledProcessError as error:
            raise MissingError(f"failed: {error}") from error
        visible = {tool: peer if tool == "peer" else None for tool in tools}
        settings = {t: _variables(folder / t, clusters[t], visible[t]) for t in tools}
        where = Phase("local", folder / "local", sdist, settings[tools[0]], MOST_SECONDS)
        local = finish(where, start(where, arguments.tests))
        names = candidates(local)
        if not names:
            raise MissingError(f"none of {len(local)} tests is a candidate: {_ends(local)}")
        print(f"{len(names)} candidates of {len(local)} tests", file=sys.stderr, flush=True)
        phases = [
            Phase(t, folder / t, sdist, settings[t], arguments.limit, clusters[t].log)
            for t in tools
        ]
        return together(phases, names)


@dataclass(frozen=True)
class Phase:
    """All tests with one executor (`local` or one of NAMES) in one folder."""

    tool: str
    folder: Path
    sdist: Path
    variables: Mapping[str, str]
    limit: float
    calls: Path | None = None

    @property
    def records(self) -> Path:
        return self.folder / "records.jsonl"


def fetch(folder: Path) -> Path:
    """Snakemake's sdist of the installed version.

    Raises:
        MissingError: pip could not bring it.
    """
    version = importlib.metadata.version("snakemake")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", "snakemake", f"snakemake=={version}", "--dest", os.fspath(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    path = folder / f"snakemake-{version}.tar.gz"
    if done.returncode or not path.is_file():
        raise MissingError(f"no sdist of snakemake {version}: {done.stderr.strip()[-500:]}")
    return path


def _cluster(folder: Path) -> AbstractContextManager[Cluster]:
    folder.mkdir()
    return private_cluster(folder, nodes=4, cpus=_CPUS)


def _variables(folder: Path, cluster: Cluster, peer: Path | None) -> dict[str, str]:
    """`environment`, our sources as given, the jobs' CPUs, and scratch folders of this run."""
    variables = environment(cluster, peer)
    site = peer or folder / "site"
    site.mkdir(exist_ok=True)
    with (site / "sitecustomize.py").open("a", encoding="utf-8") as stream:
        stream.write(AFFINITY)
    if peer is None:
        given = os.environ.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [os.fspath(site), given]))
    scratch = {"TMPDIR": folder / "tmp", "XDG_CACHE_HOME": folder / "cache"}
    for path in scratch.values():
        path.mkdir(exist_ok=True)
    return {**variables, **{name: os.fspath(path) for name, path in scratch.items()}}


def start(phase: Phase, tests: Iterable[str] | None) -> "subprocess.Popen[bytes]":
    """pytest in an unpacked copy of its own: some tests write beside themselves."""
    (phase.folder / "logs").mkdir(parents=True)
    with tarfile.open(phase.sdist) as archive:
        archive.extractall(phase.folder, filter="data")
    root = phase.folder / phase.sdist.name.removesuffix(".tar.gz")
    shutil.copy(PLUGIN, root)
    if phase.calls is not None:
        phase.calls.touch()
    with (phase.folder / "out.txt").open("wb") as out:
        return subprocess.Popen(
            _pytest(phase, tests), cwd=root, env=dict(phase.variables), stdout=out, stderr=None
        )


def _pytest(phase: Phase, tests: Iterable[str] | None) -> list[str]:
    names = ["tests/tests.py"] if tests is None else [f"tests/tests.py::{name}" for name in tests]
    return [
        *(sys.executable, "-m", "pytest", "-p", PLUGIN.stem),
        *("-p", "no:cacheprovider", "-p", "no:asyncio"),
        *("--override-ini", "addopts=", "--quiet", "--capture=no"),
        *("--chosen-executor", NAMES.get(phase.tool, phase.tool), "--limit", f"{phase.limit:g}"),
        *("--records", os.fspath(phase.records), "--logs", os.fspath(phase.folder / "logs")),
        *(["--calls", os.fspath(phase.calls)] if phase.calls else []),
        *names,
    ]


def together(phases: Sequence[Phase], names: Sequence[str]) -> list[Result]:
    """All phases at once; they wait more than they compute."""
    running: list[tuple[Phase, subprocess.Popen[bytes]]] = []
    try:
        for phase in phases:
            running.append((phase, start(phase, names)))
        return [result for phase, process in running for result in finish(phase, process)]
    finally:
        for _, process in running:
            _end(process)


def finish(phase: Phase, process: "subprocess.Popen[bytes]") -> list[Result]:
    """Its results, once pytest has ended.

    Raises:
        MissingError: pytest ran no test.
    """
    try:
        process.wait()
    finally:
        _end(process)
    if not phase.records.exists():
        out = (phase.folder / "out.txt").read_text("utf-8", "replace")
        raise MissingError(f"no test ran with the executor of {phase.tool}:\n{out[-2000:]}")
    return read_results(phase.tool, phase.records.read_text("utf-8").splitlines())


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        process.wait(60)


# --- judging


def read_results(tool: str, records: Iterable[str]) -> list[Result]:
    """The plugin's JSON lines, each with the end of its log."""
    results = []
    for record in map(json.loads, records):
        executions = record["executions"]
        log = Path(record["log"])
        fine = record["outcome"] == "passed" or not log.exists()
        text = "" if fine else log.read_text("utf-8", "replace")
        results.append(
            Result(
                test=record["test"],
                tool=tool,
                outcome=record["outcome"],
                seconds=record["seconds"],
                executors=[execution["executor"] for execution in executions],
                jobs=sum(execution["jobs"] for execution in executions),
                submissions=record["submissions"],
                left=record["left"],
                reason=reason(record["outcome"], text),
                lines=text.splitlines()[-_LAST_LINES:],
            )
        )
    return results


def candidates(local: Iterable[Result]) -> list[str]:
    """Tests that say something about an executor, by their run with the local one."""
    return [
        result.test
        for result in local
        if result.passed
        and set(result.executors) - _IDLE == {"local"}
        and 1 <= result.jobs <= MOST_JOBS
    ]


def worse(results: Iterable[Result]) -> list[str]:
    """Tests that the peer passes and ours does not."""
    passed = {(result.tool, result.test): result.passed for result in results}
    tests = dict.fromkeys(test for _, test in passed)
    return [t for t in tests if passed.get(("peer", t)) and not passed.get(("ours", t), True)]


def table(results: Sequence[Result]) -> str:
    """A Markdown row for each test that not both pass, or that only one of them put onto Slurm."""
    by_test: dict[str, dict[str, Result]] = {}
    for result in results:
        by_test.setdefault(result.test, {})[result.tool] = result
    rows = [["test", *NAMES, "reason"], ["---"] * (len(NAMES) + 2)]
    for test, sides in by_test.items():
        submitted = {bool(result.submissions) for result in sides.values()}
        if all(result.passed for result in sides.values()) and len(submitted) == 1:
            continue
        words = [sides[tool].outcome if tool in sides else "" for tool in NAMES]
        rows.append([f"`{test}`", *words, _reasons(sides)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _reasons(sides: Mapping[str, Result]) -> str:
    """For each side that did not pass its reason; where neither failed, who submitted nothing."""
    found = {tool: result.reason for tool, result in sides.items() if not result.passed}
    if not found:
        found = {t: "nothing was submitted" for t, r in sides.items() if not r.submissions}
    if len(set(found.values())) == 1 and len(found) == len(NAMES):
        found = {"both": next(iter(found.values()))}
    return "; ".join(f"{tool}: {text}" for tool, text in found.items()).replace("|", "/")


def counts(results: Sequence[Result]) -> str:
    """A Markdown table: how many tests ended how, by executor."""
    head = [
        "executor",
        "tests",
        "passed",
        "failed",
        "timeout",
        "put onto Slurm",
        "left jobs",
        "min",
    ]
    rows = [head, ["---"] * len(head)]
    for tool in dict.fromkeys(result.tool for result in results):
        own = [result for result in results if result.tool == tool]
        ends = _ends(own)
        numbers = [len(own), ends["passed"], ends["failed"], ends["timeout"]]
        numbers += [sum(bool(r.submissions) for r in own), sum(bool(r.left) for r in own)]
        numbers.append(round(sum(result.seconds for result in own) / 60))
        rows.append([tool, *map(str, numbers)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ends(results: Iterable[Result]) -> Counter[str]:
    return Counter(result.outcome for result in results)


def reason(outcome: str, text: str) -> str:
    """Why a test did not pass, in a few words of its output; empty for one that did."""
    if outcome in {"passed", "timeout"}:
        return "" if outcome == "passed" else "did not end"
    for pattern in _REASONS:
        if found := pattern.findall(text):
            return str(found[-1]).partition("; ")[0].strip()[:_REASON_LENGTH]
    return (text.strip().splitlines() or [outcome])[-1][:_REASON_LENGTH]


if __name__ == "__main__":
    sys.exit(main())
