"""A sender between Snakemake and sbatch, both stood in for: what goes out, what is heard."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from entries import identity

from snakemake_executor_plugin_submitit.exclusion import NodeGuard
from snakemake_executor_plugin_submitit.journal import Entry, JobJournal
from snakemake_executor_plugin_submitit.reattach import Candidates
from snakemake_executor_plugin_submitit.sending import JobSender
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.submit import Batch, Submitted
from snakemake_executor_plugin_submitit.work import Prepared


class Reports:
    """What Snakemake hears: job ids, or words, by what the job makes."""

    def __init__(self) -> None:
        self.job_ids: dict[str, str] = {}
        self.taken: set[str] = set()
        self.words: dict[str, str] = {}
        self.live: list[str] = []

    def submitted(self, job: Any, entry: Entry, *, taken_over: bool) -> None:
        assert job.makes == "+".join(entry.identity.makes)
        self.job_ids[job.makes] = entry.job_id
        self.taken |= {job.makes} if taken_over else set()
        self.live.append(entry.job_id)

    def refused(self, job: Any, words: str) -> None:
        self.words[job.makes] = words

    def living(self) -> int:
        return len(self.live)


class Cluster:
    """Stands for sbatch: gives job ids, or raises what `refuse` returns for a batch."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.tried: list[int] = []
        self.refuse: Callable[[Batch], Exception | None] = lambda _batch: None

    def submit(self, batch: Batch) -> Submitted:
        assert batch.folder.is_dir()
        self.tried.append(len(batch.commands))
        if error := self.refuse(batch):
            raise error
        self.batches.append(batch)
        ids = [f"{len(self.batches)}_{index}" for index in range(len(batch.commands))]
        return Submitted(ids, "")


class Desk:
    """A sender with a journal of its own; its pauses take no time but on its own clock.

    `meanwhile`: what happens in each of them.
    """

    def __init__(self, journal: JobJournal) -> None:
        self.journal = journal
        self.reports = Reports()
        self.nodes = NodeGuard(lambda _words: None)
        self.candidates = Candidates()
        self.pauses: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def clock(self) -> float:
        return sum(self.pauses)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.meanwhile()

    def sender(self, **settings: Any) -> JobSender:
        sender = JobSender(
            self.journal,
            ExecutorSettings(**settings),
            self.candidates,
            self.nodes,
            self.journal.base / "logs",
            report=self.reports,
            logger=logging.getLogger("test"),
        )
        sender.sleep = self.sleep
        return sender


def ready(*makes: str, how: str = "so", **changes: Any) -> Prepared:
    """A job for the sender; `makes`: its outputs."""
    name = "+".join(makes)
    given: dict[str, Any] = {
        "job": SimpleNamespace(name="train", makes=name),
        "identity": identity(*makes, how=how),
        "label": f"train {name}",
        "log_folder": Path("rule_train"),
        "command": f"make {name}",
        "parameters": {"mem": "1M"},
        "checkpoints": False,
        "exclude_file": None,
        **changes,
    }
    return Prepared(**given)
