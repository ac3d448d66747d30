"""Do the components of a GRPO stage reach each other from the nodes where they will run?

The first node plays inference server and orchestrator, the trainer's nodes the trainer. They
hand on what a stage does (rollout/store.py): the server's address, a batch, weights, the version
that the server answers with.
"""

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shakedown.core.private import make_folders
from shakedown.preflight.check import Check, CheckJudgement, Fleet
from shakedown.preflight.checks.files import marker_folder
from shakedown.preflight.checks.visibility import leave_file
from shakedown.preflight.datatypes import NodeFacts, ProbeRequest

# In the order in which they happen: the first that fails on any node is the cause of the others.
STEPS = {
    "listen": "the inference server listens on the first node's address",
    "endpoint": "every trainer node reads where the server is",
    "server": "the orchestrator and every trainer node reach the server",
    "batch": "every trainer node reads the orchestrator's batch",
    "weights": "the orchestrator reads the trainer's weights",
    "load": "the server loads them",
    "loaded": "every trainer node reads that they are loaded",
}
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 5.0


class _BrokenError(Exception):
    """A step failed. `waits_for`: nodes whose file did not come."""

    def __init__(self, step: str, why: str, waits_for: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.step, self.waits_for = step, waits_for


class _Exchange:
    """Files of all nodes in one folder, and a time by which they must be there."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._deadline = folder, time.monotonic() + seconds
        self.seconds = seconds

    def leave(self, name: str, text: str = "x") -> None:
        leave_file(self._folder, f"@{name}", text)

    def has(self, name: str) -> bool:
        return (self._folder / f"seen-@{name}").exists()

    def take(self, step: str, name: str, of: str) -> str:
        """The text of a file.

        Raises:
            _BrokenError: it did not come in time.
        """
        path = self._folder / f"seen-@{name}"
        while not path.exists():
            if time.monotonic() > self._deadline:
                raise _BrokenError(step, f"no {name} within {self.seconds:g} s", (of,))
            time.sleep(_POLL_SECONDS)
        return path.read_text()


def measure(request: ProbeRequest, node: str) -> NodeFacts:
    """`failed`: the step that failed, empty if none; `why`, `waits_for`, `late`: all was over."""
    folder = marker_folder(request)
    make_folders(folder)
    order = list(request.addresses)
    trainers = [order[number] for number in request.want.trainers if number < len(order)]
    exchange = _Exchange(folder, request.limit * 0.6)
    facts: dict[str, object] = {"first": order[0], "failed": "", "why": "", "waits_for": []}
    begin = time.monotonic()
    try:
        facts["late"] = node != order[0] and exchange.has("over")
        if node == order[0]:
            _serve(exchange, request.addresses[node], node, trainers)
        elif node in trainers and not facts["late"]:
            _train(exchange, node, order[0])
    except _BrokenError as broken:
        facts |= {"failed": broken.step, "why": str(broken), "waits_for": [*broken.waits_for]}
    finally:
        if node == order[0]:
            exchange.leave("over")
    return {**facts, "seconds": round(time.monotonic() - begin, 3)}


def _serve(exchange: _Exchange, address: str, node: str, trainers: list[str]) -> None:
    """Inference server and orchestrator."""
    with _server(address) as place:
        _ask(place, "GET", "0")
        exchange.leave("endpoint", place)
        exchange.leave("batch")
        if node in trainers:
            exchange.leave(f"weights-{node}")
        for trainer in trainers:
            exchange.take("weights", f"weights-{trainer}", trainer)
        _ask(place, "POST", "1", step="load")
        exchange.leave("loaded")


def _train(exchange: _Exchange, node: str, first: str) -> None:
    place = exchange.take("endpoint", "endpoint", first)
    _ask(place, "GET", "0")
    exchange.take("batch", "batch", first)
    exchange.leave(f"weights-{node}")
    exchange.take("loaded", "loaded", first)


@contextmanager
def _server(address: str) -> Iterator[str]:
    """`host:port` of a server that answers with its version of the weights; POST raises it."""
    from aiohttp import web

    from shakedown.core.http import application, in_thread, listening

    version = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal version
        version += request.method == "POST"
        return web.Response(text=str(version))

    try:
        bound = socket.create_server((address, 0))
    except OSError as error:
        raise _BrokenError("listen", f"{address}: {error.strerror or error}") from error
    with bound, in_thread(listening(application(answer), bound)) as port:
        yield f"{address}:{port}"


def _ask(place: str, method: str, expected: str, step: str = "server") -> None:
    from shakedown.core.http import NoAnswerError, fetch

    try:
        # No proxy is asked, as engines' clients on a cluster must not either.
        answer = fetch(method, f"http://{place}/", seconds=_ANSWER_SECONDS).text[:100]
    except NoAnswerError as error:
        raise _BrokenError(step, f"{place}: {error.why}") from error
    if answer != expected:
        raise _BrokenError(
            step, f"{place} answered {answer!r}, expected {expected!r}: another program"
        )


def compare(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """The earliest step that failed is the cause; who only waited, or came late, is skipped."""
    facts = fleet.facts("components")
    first = next((row["first"] for row in facts.values()), "")
    # Who waits in vain for a node that gave no answer is not at fault.
    late = {n for n, row in facts.items() if row["late"]}
    there = facts.keys() - late
    alone = {n for n, row in facts.items() if set(row["waits_for"]) - there} | late
    steps = list(STEPS)
    broken = {n: steps.index(row["failed"]) for n, row in facts.items() if row["failed"]}
    cause = min((step for n, step in broken.items() if n not in alone), default=len(steps))
    guilty = {n for n, step in broken.items() if step == cause and n not in alone}
    trainers = facts.keys() - alone - {first}
    if cause == steps.index("server") and len(guilty) > 1 and guilty == trainers:
        guilty = {first}
    return {
        n: _judged(row, facts, n in guilty, n in broken or n in alone) for n, row in facts.items()
    }


def _judged(
    row: NodeFacts, facts: Mapping[str, NodeFacts], guilty: bool, waited: bool
) -> CheckJudgement:
    if guilty:
        seen = row if row["failed"] else next(r for r in facts.values() if r["failed"] == "server")
        remedy = "look at firewall, NodeAddr and the results folder of this node"
        return CheckJudgement(
            "fail", f"{seen['failed']}: {seen['why']}", STEPS[seen["failed"]], remedy=remedy
        )
    if waited:
        return CheckJudgement("skip", "waited for another node", "all steps")
    return CheckJudgement("pass", row["seconds"], "all steps", "s")


COMPONENTS = Check(
    "components",
    "inference server, orchestrator and trainer do not reach each other from the nodes of a GRPO "
    "stage: the server's port, the batch, the weights, the loaded version",
    measure,
    compare=compare,
    needs="trainers",
    limit="three fifths of `--timeout`",
    source="prime-rl's guide: test component communication before the training",
)
