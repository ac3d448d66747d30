"""Episodes and their measurements: the data that checks are judged by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shakedown.agents.call_log import CallLog
from shakedown.agents.contract import Reward, one_number
from shakedown.agents.measured import Measured


@dataclass(frozen=True)
class Episode:
    """One call of `run`. `cause` is empty when it went well, else a key of `causes.CAUSES`.

    `group` is the data row, `member` the sample of that row; `seconds` is the time of the call
    alone, without the wait for a place among the concurrent ones. `trace`: the traceback of an
    exception in the agent. `on_purpose`: a check made it fail. `tokens`: sampled for it, as far as
    that is known. `log`: its calls of the server. `calls_made`, `calls_failed`, `answered`, `hop`,
    `lost`, `resent`, `by_agent`: as in `AgentResult`.
    """

    index: int
    group: int
    member: int
    reward: Reward | None = None
    cause: str = ""
    detail: str = ""
    status: int = 0
    seconds: float = 0.0
    trace: str = ""
    on_purpose: bool = False
    tokens: int = 0
    log: CallLog | None = None
    calls_made: int = 0
    calls_failed: int = 0
    answered: float = 0.0
    hop: str = ""
    lost: Mapping[str, int] = field(default_factory=dict)
    resent: int = 0
    by_agent: bool = False

    @property
    def rewarded(self) -> float | None:
        """The reward as training counts it: 0 where the agent failed after a good reply; None: the
        episode is left out.
        """
        if self.reward is None:
            return 0.0 if self.by_agent and self.calls_made > self.calls_failed else None
        return one_number(self.reward)

    @property
    def ok(self) -> bool:
        return not self.cause

    def to_json(self) -> dict[str, Any]:
        """A line of episodes.jsonl."""
        log = self.log.to_json() if self.log else {"seen_by": "", "left_out": 0, "calls": []}
        return {
            "index": self.index,
            "group": self.group,
            "member": self.member,
            "reward": self.reward,
            "cause": self.cause,
            "detail": self.detail,
            "status": self.status,
            "seconds": round(self.seconds, 6),
            "trace": self.trace,
            "on_purpose": self.on_purpose,
            "calls_seen_by": log["seen_by"],
            "calls_left_out": log["left_out"],
            "calls": log["calls"],
        }


@dataclass(frozen=True)
class Stop:
    """Why a run ended early.

    `signal`: the number of one, else 0. `gone_since`: Unix time at which the server was first seen
    to be gone, else 0. `seen`: what was seen, for people.
    """

    seen: str
    signal: int = 0
    gone_since: float = 0.0


@dataclass(frozen=True)
class RunResult:
    """Every episode in order, and the measurements around them (times in seconds).

    `stop`: why it ended early; None: it did not.
    """

    episodes: Sequence[Episode] = ()
    measured: Measured = field(default_factory=Measured)
    seconds: float = 0.0
    stop: Stop | None = None

    @property
    def first_failed(self) -> Episode | None:
        """The first episode that failed by itself."""
        not_by_itself = ("", "not_asked")
        failed = (e for e in self.episodes if e.cause not in not_by_itself and not e.on_purpose)
        return next(failed, None)

    def groups(self) -> dict[int, list[Episode]]:
        """Episodes by data row."""
        table: dict[int, list[Episode]] = {}
        for episode in self.episodes:
            table.setdefault(episode.group, []).append(episode)
        return table
