"""A process that runs one reward function: `python -m shakedown.agents.reward_worker`.

Reads JSON lines from standard input, the first one its setup, then requests:

    {"reward": NAME, "import_seconds": S, "seconds": S, "bytes": B}
                                                     -> {} or {"fault": TEXT}
    {"completions": [TEXT...], "answer": TEXT, "row": {COLUMN: VALUE...}}
                                                     -> one line each: {"value": V} or
                                                        {"cause": CAUSE, "detail": TEXT}

The process limits itself, so that it ends also when nobody is left to end it: an alarm ends a call
that is too long, the data limit one that allocates too much.
"""

import json
import os
import resource
import signal
import sys
from typing import Any

from shakedown.agents.contract import BadReturnError, judge_number
from shakedown.agents.imports import last_frame
from shakedown.agents.rewards import get_reward
from shakedown.agents.rewards.custom_reward import RowReward, with_row
from shakedown.core.errors import ShakedownError
from shakedown.debug.debug_settings import stop_at_exception
from shakedown.processes.workers import WorkerStreams

_ALARM_GRACE = 1.0  # seconds that the parent has to be first: it knows more
_LONGEST_DETAIL = 500  # characters: an exception may quote the whole completion


def main() -> int:
    """Serve until standard input ends."""
    streams = WorkerStreams()
    setup = streams.read_setup()
    _limit_memory(setup["bytes"])
    signal.setitimer(signal.ITIMER_REAL, setup["import_seconds"] + _ALARM_GRACE)
    try:
        reward = with_row(get_reward(setup["reward"]))
    except ShakedownError as error:
        streams.say(fault=str(error))
        return int(error.exit_code)
    streams.say()
    signal.setitimer(signal.ITIMER_REAL, 0)
    with os.fdopen(streams.requests, encoding="utf-8") as requests:
        for line in requests:
            _serve(reward, json.loads(line), streams, setup["seconds"] + _ALARM_GRACE)
    return 0


def _serve(reward: RowReward, request: Any, streams: WorkerStreams, alarm: float) -> None:
    for completion in request["completions"]:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the reward may have taken it
        signal.setitimer(signal.ITIMER_REAL, alarm)
        reply = _judged(reward, completion, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        streams.say(**reply)


def _judged(reward: RowReward, completion: str, request: Any) -> dict[str, Any]:
    """The reply to one call; SystemExit and the like end the process and are seen as that."""
    try:
        given = reward(completion, request["answer"], request["row"])
        return {"value": judge_number(given, "the reward")}
    except BadReturnError as error:
        return _fault("bad_return", str(error))
    except MemoryError:
        return _fault("memory", "it allocated more than its limit")
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything
        stop_at_exception(error)
        return _fault("exception", f"{type(error).__name__}: {error} ({last_frame(error)})")


def _fault(cause: str, detail: str) -> dict[str, Any]:
    return {"cause": cause, "detail": " ".join(detail.split())[:_LONGEST_DETAIL]}


def _limit_memory(limit: int) -> None:
    """Limit the data alone: libraries that are mapped and not written to do not count."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":
    sys.exit(main())
