"""Import an agent class and check its contract: `python -m shakedown.agents.agent_import`.

Imports nothing but the class: unlike a worker that runs episodes it needs no client library.
"""

import sys
from collections.abc import Mapping
from typing import Any

from shakedown.agents.contract import load_agent
from shakedown.agents.endpoint import AgentEndpoint, set_environment
from shakedown.agents.worker_pool import Worker
from shakedown.agents.worker_streams import WorkerStreams
from shakedown.core.errors import ShakedownError


async def agent_fault(
    target: str, kwargs: Mapping[str, Any] | None = None, *, seconds: float
) -> str:
    """What is wrong with an agent, found in a process of its own; empty when it can be used.

    Args:
        kwargs: for the constructor, of what JSON has a form for.
        seconds: that its import may take.
    """
    try:
        worker = await Worker.start(
            "shakedown.agents.agent_import",
            {"target": target, "kwargs": dict(kwargs or {})},
            what=f"agent {target!r}",
            seconds=seconds,
        )
    except ShakedownError as error:
        return str(error)
    await worker.end()
    return ""


def main() -> int:
    """Answer the one request."""
    streams = WorkerStreams()
    setup = streams.read_setup()
    if setup is None:
        return 0
    # As the worker of episodes does before the import: a module may make its client at once.
    set_environment(AgentEndpoint("http://127.0.0.1:9/v1", "None", "policy"))
    try:
        load_agent(setup["target"], setup["kwargs"])
    except ShakedownError as error:
        streams.say(fault=str(error))
        return int(error.exit_code)
    streams.say()
    return 0


if __name__ == "__main__":
    sys.exit(main())
