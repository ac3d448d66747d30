"""A process that runs one reward function: `python -m shakedown.agents.reward_worker`.

Reads JSON lines from standard input, the first one an order, then jobs:

    {"reward": NAME, "import_seconds": S, "seconds": S, "bytes": B}
                                                     -> {} or {"fault": TEXT}
    {"completions": [TEXT...], "answer": TEXT}       -> a line each: {"value": V} or
                                                        {"cause": CAUSE, "detail": TEXT}

What the reward prints goes to standard error. The process limits itself, so that it ends also
when nobody is left to end it: an alarm ends a call that is too long, the data limit one that
allocates too much.
"""

import json
import os
import resource
import signal
import sys
from typing import IO, Any

from shakedown.agents.contract import BadReturnError, judge_number
from shakedown.agents.imports import last_frame
from shakedown.agents.rewards import RewardFunction, get_reward
from shakedown.core.errors import ShakedownError

_ALARM_GRACE = 1.0  # seconds that the parent has to be first: it knows more
_LONGEST_DETAIL = 500
# Sent to a whole stage: its trainer still finishes the step in work, with its rewards. Workers end
# with their parent.
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Serve until standard input ends."""
    for number in _NOT_FOR_US:
        signal.signal(number, lambda *_: None)  # not SIG_IGN: that would pass to children
    with (
        os.fdopen(os.dup(0), encoding="utf-8") as orders,
        os.fdopen(os.dup(1), "w", encoding="utf-8") as replies,
    ):
        _close_standard_streams()
        order = json.loads(orders.readline() or "null")
        if order is None:
            return 0
        _limit_memory(order["bytes"])
        signal.setitimer(signal.ITIMER_REAL, order["import_seconds"] + _ALARM_GRACE)
        try:
            reward = get_reward(order["reward"])
        except ShakedownError as error:
            _say(replies, {"fault": str(error)})
            return int(error.exit_code)
        _say(replies, {})
        signal.setitimer(signal.ITIMER_REAL, 0)
        for line in orders:
            _serve(reward, json.loads(line), replies, order["seconds"] + _ALARM_GRACE)
    return 0


def _serve(reward: RewardFunction, job: Any, replies: IO[str], alarm: float) -> None:
    for completion in job["completions"]:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the reward may have taken it
        signal.setitimer(signal.ITIMER_REAL, alarm)
        reply = _judged(reward, completion, job["answer"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(replies, reply)


def _judged(reward: RewardFunction, completion: str, answer: str) -> dict[str, Any]:
    """The reply to one call; SystemExit and the like end the process and are seen as that."""
    try:
        return {"value": judge_number(reward(completion, answer), "the reward")}
    except BadReturnError as error:
        return _fault("bad_return", str(error))
    except MemoryError:
        return _fault("memory", "it allocated more than its limit")
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything
        return _fault("exception", f"{type(error).__name__}: {error} ({last_frame(error)})")


def _fault(cause: str, detail: str) -> dict[str, Any]:
    return {"cause": cause, "detail": " ".join(detail.split())[:_LONGEST_DETAIL]}


def _say(replies: IO[str], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _close_standard_streams() -> None:
    """A reward that prints or reads must not spoil the talk."""
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _limit_memory(limit: int) -> None:
    """Data only: libraries that are mapped and not written to do not count."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":
    sys.exit(main())
