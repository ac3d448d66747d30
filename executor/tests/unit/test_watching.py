"""What becomes of submitted jobs while they are watched: where their logs are to be seen."""

import asyncio
import logging
from contextlib import nullcontext
from pathlib import Path

from entries import NAME, entry
from slurm_programs import Programs

from snakemake_executor_plugin_submitit.exclusion import NodeGuard
from snakemake_executor_plugin_submitit.polling import Poller
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.watching import JobWatcher, WatchedJob


class Watched:
    """A job under watch."""

    def __init__(self, base: Path) -> None:
        self.link = base / "logs" / "rule_train" / "7" / "7.log"
        self.watch = WatchedJob(entry("7", log=str(self.link)))
        self.log = self.watch.entry.log_file(base)
        self._watcher = JobWatcher(
            base,
            ExecutorSettings(),
            Poller(0.0, 900.0, say=lambda _words: None),
            NodeGuard(lambda _words: None),
            logs=base / "logs",
            logger=logging.getLogger("test"),
        )

    def poll(self) -> str:
        """Ask Slurm once and judge by its answer."""
        return asyncio.run(self._poll())

    async def _poll(self) -> str:
        await self._watcher.look([self.watch], nullcontext())
        assert self._watcher._asking is not None
        await self._watcher._asking
        (judgement,) = await self._watcher.look([self.watch], nullcontext())
        return judgement.outcome


def test_a_link_by_rule_and_wildcards_leads_to_the_log_of_a_job_that_runs(
    tmp_path: Path, programs: Programs
) -> None:
    watched = Watched(tmp_path)
    watched.log.parent.mkdir(parents=True)
    watched.log.write_text("step one")

    seen = []
    for state in ("PENDING", "RUNNING", "COMPLETING"):
        programs.answer("squeue", f"7|{state}|None|n1|N/A|{NAME}\n")
        seen.append((watched.poll(), watched.link.is_symlink()))

    assert seen == [("running", False), ("running", True), ("running", True)]
    assert watched.link.read_text() == "step one"


def test_a_job_that_has_ended_gets_no_link(tmp_path: Path, programs: Programs) -> None:
    watched = Watched(tmp_path)
    programs.answer("squeue", f"7|FAILED|NonZeroExitCode|n1|N/A|{NAME}\n")

    assert watched.poll() == "failed"
    assert not watched.link.parent.exists()
