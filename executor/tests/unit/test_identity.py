"""Which changes make another job of one, seen on Snakemake's own jobs."""

import contextlib
import io
import linecache
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from snakemake.api import SnakemakeApi
from snakemake.settings.enums import Quietness
from snakemake.settings.types import (
    ConfigSettings,
    DAGSettings,
    OutputSettings,
    ResourceSettings,
    WorkflowSettings,
)

from snakemake_executor_plugin_submitit.identity import JobIdentity, WorkingFolder, identify

SNAKEFILE = """
rule all:
    input: "shell.txt", "run.txt", "script.txt"
rule shell:
    input: "in.txt"
    output: "shell.txt"
    params: depth=3
    threads: 2
    resources: mem_mb=lambda wildcards, attempt: 100 * attempt
    shell: "make {params.depth} {input} {output} {threads} {resources.mem_mb} {config[seed]}"
rule run:
    input: ancient("in.txt"), "folder"
    output: "run.txt"
    params: depth=lambda wildcards: 3, call=print
    run: open(output[0], "w").write("3")
rule script:
    input: "in.txt"
    output: "script.txt"
    script: "make.py"
"""
CONFIG = {"seed": 1, "name": "a"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, text in {"Snakefile": SNAKEFILE, "in.txt": "in", "make.py": "3"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def identities(config: dict[str, Any] = CONFIG, attempt: int = 1) -> dict[str, JobIdentity]:
    """By rule, of the jobs of the Snakefile in the working directory."""
    linecache.clearcache()  # Snakemake reads the code of `run:` through it, once a process
    with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
        dag = api.workflow(
            resource_settings=ResourceSettings(cores=2),
            config_settings=ConfigSettings(config=config),
            workflow_settings=WorkflowSettings(),
            snakefile=Path("Snakefile"),
        ).dag(DAGSettings(forceall=True))
        with contextlib.redirect_stdout(io.StringIO()):
            dag.printrulegraph()
        jobs = {job.rule.name: job for job in dag.workflow_api._workflow_store.dag.jobs}
        for job in jobs.values():
            job.attempt = attempt
        return {name: identify(job) for name, job in jobs.items() if name != "all"}


def edit(path: str, old: str, new: str) -> None:
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def changed(before: dict[str, JobIdentity], after: dict[str, JobIdentity]) -> set[str]:
    assert before.keys() == after.keys() == {"shell", "run", "script"}
    return {name for name in before if before[name] != after[name]}


def test_a_job_makes_its_outputs(folder: Path) -> None:
    assert identities()["shell"].makes == ("shell.txt",)


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (lambda: None, set()),
        (lambda: edit("Snakefile", "depth=3", "depth=4"), {"shell"}),
        (lambda: edit("Snakefile", "wildcards: 3", "wildcards: 4"), {"run"}),
        (lambda: edit("Snakefile", '"make {', '"build {'), {"shell"}),
        (lambda: edit("Snakefile", 'write("3")', 'write("4")'), {"run"}),
        (lambda: edit("make.py", "3", "4"), {"script"}),
        (lambda: edit("Snakefile", 't: "in.txt"', 't: "in.txt", "Snakefile"'), {"shell", "script"}),
        (lambda: edit("in.txt", "in", "input"), {"shell", "script"}),
        (lambda: os.utime("in.txt", (1, 1)), {"shell", "script"}),
        (lambda: Path("folder/more").touch(), {"run"}),
        (lambda: edit("Snakefile", "threads: 2", "threads: 1"), set()),
        (lambda: edit("Snakefile", "100 * attempt", "200 * attempt"), set()),
        (lambda: edit("Snakefile", "rule all:", "# a remark\nrule all:"), set()),
    ],
)  # fmt: skip
def test_what_changes_a_job_is_what_snakemake_reruns_it_for(
    folder: Path, change: Callable[[], None], rules: set[str]
) -> None:
    before = identities()

    change()

    assert changed(before, identities()) == rules


def test_a_config_changes_the_jobs_that_see_it(folder: Path) -> None:
    before = identities()

    assert changed(before, identities({**CONFIG, "seed": 2})) == {"shell", "run", "script"}
    assert changed(before, identities({**CONFIG, "name": "b"})) == {"run", "script"}
    assert changed(before, identities({"name": "a", "seed": 1})) == set()


def test_a_retry_is_the_same_job(folder: Path) -> None:
    assert changed(identities(), identities(attempt=3)) == set()


def test_a_place_is_known_by_path_inode_and_while_it_has_a_meaning_device(tmp_path: Path) -> None:
    here = WorkingFolder.here()

    assert here.is_same(WorkingFolder.here())
    assert not here.is_same(replace(here, path=str(tmp_path)))
    assert not here.is_same(replace(here, inode=here.inode + 1))
    assert not here.is_same(replace(here, device=here.device + 1))
    assert here.is_same(replace(here, device=here.device + 1, boot="another"))
