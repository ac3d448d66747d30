"""A pytest plugin for Snakemake's own tests: each in a process of its own, its workflows run by a
chosen executor, and whatever it leaves in the Slurm queue cancelled before the next.

Imports nothing of the project: it is copied beside the unpacked tests. Writes one JSON line a test.
"""

import asyncio
import functools
import importlib
import inspect
import json
import os
import pwd
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

OUTCOMES = {0: "passed", 1: "failed", 2: "skipped"}
# What a user of Slurm gives; the rest are Snakemake's own defaults on a cluster.
DEFAULT_RESOURCES = ["runtime=5", "slurm_partition=main"]
# Snakemake's tests say 0; the official executor waits 40 and more, 10 longer after each look.
SECONDS_BETWEEN_LOOKS = 1
# For a cancelled or killed test to end by itself, and for ended jobs to leave the queue.
_GRACE_SECONDS = 10.0
_QUEUE_SECONDS = 30.0

# Of the test that this process runs: the executions that its workflows came to.
_executions: list[dict[str, Any]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chosen executor")
    group.addoption("--chosen-executor", choices=["local", "submitit", "slurm"], required=True)
    group.addoption("--limit", type=float, required=True, help="seconds of one test")
    group.addoption("--records", type=Path, required=True, help="JSON lines, one a test")
    group.addoption("--logs", type=Path, required=True, help="folder of the tests' output")
    group.addoption("--calls", type=Path, help="the log of Slurm's programs' wrappers")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module has imported `run`."""
    from snakemake.api import DAGApi
    from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    common = importlib.import_module("tests.common")
    chosen = config.getoption("chosen_executor")
    path = os.environ.get("PYTHONPATH", "")
    RemoteExecutor.sleep = _short_sleep
    DAGApi.execute_workflow = watched(DAGApi.execute_workflow, chosen, path)
    common.run = with_executor(common.run, chosen)  # type: ignore[attr-defined]


async def _short_sleep(_executor: object) -> None:
    await asyncio.sleep(SECONDS_BETWEEN_LOOKS)


def with_executor(run: Callable[..., Any], executor: str) -> Callable[..., Any]:
    """`run`, whose workflows go to `executor` where the test has not chosen another way.

    `cluster` is a script of the test's own that stands for a cluster: the executor replaces it.
    """
    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

    signature = inspect.signature(run)

    @functools.wraps(run)
    def chosen(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        if {"executor", "shellcmd"} & set(given):
            return run(*args, **options)
        for name in ("cluster", "cluster_status"):
            options.pop(name, None)
        if executor == "local":
            return run(*args, **options)
        # As many jobs at once as the test would have cores: some tell the order of their jobs.
        nodes = given.get("cores", signature.parameters["cores"].default)
        for name, value in {"nodes": nodes, "default_resources": DEFAULT_RESOURCES}.items():
            if given.get(name) is None:
                options[name] = value
        settings = ExecutorPluginRegistry().get_plugin(executor).settings_cls()
        return run(*args, **options, executor=executor, executor_settings=settings)

    return chosen


def watched(execute: Callable[..., Any], chosen: str, path: str) -> Callable[..., Any]:
    """`execute_workflow`, noted; `run` overwrites PYTHONPATH, which the jobs need as it was."""

    @functools.wraps(execute)
    def noted(dag: Any, executor: str = "local", **options: Any) -> Any:
        execution = {"executor": executor, "jobs": 0}
        _executions.append(execution)
        remote = options.get("remote_execution_settings")
        if executor == chosen and remote is not None:
            remote.seconds_between_status_checks = SECONDS_BETWEEN_LOOKS
        kept = filter(None, [os.environ.get("PYTHONPATH"), path])
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
        try:
            return execute(dag, executor=executor, **options)
        finally:
            scheduler = getattr(dag.workflow_api._workflow, "scheduler", None)
            if scheduler is not None:
                execution["jobs"] = scheduler.finished_jobs + len(scheduler.failed)

    return noted


# --- one test, one process


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    config = pyfuncitem.config
    records: Path = config.getoption("records")
    log: Path = config.getoption("logs") / f"{pyfuncitem.name.replace(os.sep, '_')}.log"
    notes = log.with_suffix(".json")
    calls = _submissions(config)
    began = time.monotonic()
    child = os.fork()
    if not child:
        _run_and_leave(pyfuncitem, log, notes)
    outcome = _outcome(child, config.getoption("limit"))
    seconds = time.monotonic() - began
    executor = config.getoption("chosen_executor")
    left = [] if executor == "local" else empty_queue()
    record = {
        "test": pyfuncitem.name,
        "outcome": outcome,
        "seconds": round(seconds, 1),
        "executions": json.loads(notes.read_text("utf-8")) if notes.exists() else [],
        "submissions": _submissions(config) - calls,
        "left": left,
        "log": os.fspath(log),
    }
    with records.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")
    print(f"{executor}: {outcome} {pyfuncitem.name} {seconds:.1f} s", file=sys.stderr, flush=True)
    if outcome == "skipped":
        pytest.skip("inside the test")
    if outcome != "passed":
        pytest.fail(f"{outcome}, see {log}", pytrace=False)
    return True


def _submissions(config: pytest.Config) -> int:
    """Calls of sbatch so far."""
    calls: Path | None = config.getoption("calls")
    return 0 if calls is None else calls.read_text("utf-8").splitlines().count("client sbatch")


def _run_and_leave(item: pytest.Function, log: Path, notes: Path) -> NoReturn:
    """In the child: the test's outcome is the exit code, its output a file."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(descriptor, number)
    code = 0
    try:
        item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
    except pytest.skip.Exception:
        code = 2
    except BaseException:  # noqa: BLE001  # whatever it is, it is the test's outcome
        code = 1
        traceback.print_exc()
    notes.write_text(json.dumps(_executions), "utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _outcome(child: int, seconds: float) -> str:
    """How the child ended; after `seconds` it and all that it started are ended."""
    try:
        status = _wait(child, seconds)
        if status is not None:
            return OUTCOMES.get(os.waitstatus_to_exitcode(status), "failed")
        _signal(child, signal.SIGTERM)
        _wait(child, _GRACE_SECONDS)
        return "timeout"
    finally:  # whatever outlived the test
        _signal(child, signal.SIGKILL)


def _wait(child: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.05)
    return None


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


# --- the queue


def empty_queue() -> list[str]:
    """Names of the jobs that a test has left; they are cancelled and gone."""
    left = _after(3.0)
    if left:
        user = pwd.getpwuid(os.getuid()).pw_name
        subprocess.run(["scancel", "--user", user], check=True)
        if still := _after(_QUEUE_SECONDS):
            raise RuntimeError(f"not cancelled after {_QUEUE_SECONDS:g} s: {still}")
    return left


def _after(seconds: float) -> list[str]:
    """What is in the queue once it is empty, or after so long."""
    end = time.monotonic() + seconds
    while True:
        command = ["squeue", "--noheader", "--format=%i %T %j"]
        jobs = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        if not jobs or time.monotonic() > end:
            return jobs.splitlines()
        time.sleep(0.3)
