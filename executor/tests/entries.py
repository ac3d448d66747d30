"""Jobs as the journal has them."""

from typing import Any

from snakemake_executor_plugin_submitit.identity import JobIdentity
from snakemake_executor_plugin_submitit.journal import Entry, name_ending

RUN = "20260314-101500-a1b2c3d4"
NAME = f"train{name_ending(RUN, 1)}"


def identity(*makes: str, how: str = "so") -> JobIdentity:
    return JobIdentity(makes, how)


def entry(job_id: str, **changes: Any) -> Entry:
    """A job of `RUN` that makes a file named after its id."""
    given: dict[str, Any] = {
        "identity": identity(f"made by {job_id}"),
        "label": "train",
        "job_id": job_id,
        "name": NAME,
        "cluster": "",
        "token": f"1-{job_id}",
        "run": RUN,
        "log": f"logs/rule_train/{job_id}.log",
        **changes,
    }
    return Entry(**given)
