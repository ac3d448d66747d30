"""A sender's surroundings: Slurm's programs, a cluster and the desk between them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from sender_desk import Cluster, Desk
from slurm_programs import Programs

from snakemake_executor_plugin_submitit import sending
from snakemake_executor_plugin_submitit.journal import JobJournal


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = Programs(folder, monkeypatch)
    programs.answer("squeue")
    programs.answer("scancel")
    return programs


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(sending, "submit", cluster.submit)
    return cluster


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with closing(JobJournal(tmp_path / "submitit")) as journal:
        desk = Desk(journal)
        clock = SimpleNamespace(monotonic=desk.clock, sleep=desk.sleep)
        monkeypatch.setattr(sending, "time", clock)
        yield desk
