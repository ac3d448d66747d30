"""A sender between Snakemake and sbatch, both stood in for: what goes out, what is heard."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snakemake_executor_plugin_submitit.exclusion import NodeHistory
from snakemake_executor_plugin_submitit.journal import Entry, Journal
from snakemake_executor_plugin_submitit.reattach import Candidate
from snakemake_executor_plugin_submitit.sending import Sender
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.submit import Batch
from snakemake_executor_plugin_submitit.work import Prepared


class Reports:
    """What Snakemake hears: job ids, or words, by the job's key."""

    def __init__(self) -> None:
        self.job_ids: dict[str, str] = {}
        self.taken: set[str] = set()
        self.words: dict[str, str] = {}

    def submitted(self, job: Any, entry: Entry, *, taken_over: bool) -> None:
        assert job.key == entry.key
        self.job_ids[entry.key] = entry.job_id
        self.taken |= {entry.key} if taken_over else set()

    def refused(self, job: Any, words: str) -> None:
        self.words[job.key] = words


class Cluster:
    """Stands for sbatch: gives job ids, or raises what `refuse` returns for a batch."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.tried: list[int] = []
        self.refuse: Callable[[Batch], Exception | None] = lambda _batch: None

    def submit(self, batch: Batch, folder: Path) -> list[str]:
        assert folder.is_dir()
        self.tried.append(len(batch.work))
        if error := self.refuse(batch):
            raise error
        self.batches.append(batch)
        return [f"{len(self.batches)}_{index}" for index in range(len(batch.work))]


class Desk:
    """A sender with a journal of its own; its pauses take no time."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.reports = Reports()
        self.nodes = NodeHistory()
        self.candidates: dict[str, Candidate] = {}
        self.pauses: list[float] = []

    def sender(self, **settings: Any) -> Sender:
        sender = Sender(
            self.journal,
            ExecutorSettings(**settings),
            self.candidates,
            self.nodes,
            report=self.reports,
            logger=logging.getLogger("test"),
        )
        sender.sleep = self.pauses.append
        return sender


def ready(key: str, **changes: Any) -> Prepared:
    job = SimpleNamespace(name="train", input=[], key=key)
    given: dict[str, Any] = {
        "parameters": {"mem": "1M"},
        "checkpoints": False,
        "exclude_file": None,
        **changes,
    }
    return Prepared(job=job, key=key, fingerprint="print", command=f"make {key}", **given)
