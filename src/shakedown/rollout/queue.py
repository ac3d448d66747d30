"""Which prompts are drawn and which batches wait for the trainer, so that both survive a restart.

exchange/places/step_000007.json   where the drawing stood when the batch of step 7 was made
checkpoints/step_000007/rollouts/  after step 7: its place, and the later batches with theirs
    step_000007.json
    step_000008.npz step_000008.json

A group is used up when it is in a batch or has failed. What was in flight, or ready and not yet in
a batch, is drawn again by the one who goes on: no prompt is drawn twice or lost.
"""

import json
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shakedown.core.errors import StorageError, UsageError
from shakedown.core.files import is_count, read_object, write_json
from shakedown.core.folders import storage_errors, sync_file
from shakedown.rollout.batch import RolloutBatch, read_batch
from shakedown.rollout.groups import Group, Prompt, draw
from shakedown.rollout.store import RolloutStore

_FOLDER = "rollouts"


@dataclass(frozen=True)
class PromptCursor:
    """`next`: number of the next draw, from 0 over all epochs; `open`: earlier ones not used up."""

    next: int
    open: Sequence[int] = ()


@dataclass(frozen=True)
class SavedQueue:
    """What a checkpoint has for the steps after it: batches in their order, each with its place.

    `place`: after the last of them. `messages`: for people.
    """

    place: PromptCursor
    batches: Sequence[RolloutBatch] = ()
    places: Sequence[PromptCursor] = ()
    messages: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class QueuedPrompt:
    """A prompt under the number of its draw."""

    number: int
    prompt: Prompt


@dataclass(frozen=True)
class FinishedGroup:
    """The group that came of a draw."""

    number: int
    group: Group


class RolloutQueue:
    """The orchestrator's prompts in seeded order; keeps account of what became of each draw.

    Args:
        run_group: makes the group of a prompt.
        kept: of the checkpoint that the stage goes on from.
    """

    def __init__(
        self,
        exchange: RolloutStore,
        prompts: Sequence[Prompt],
        run_group: Callable[[Prompt], Awaitable[Group]],
        *,
        seed: int,
        kept: SavedQueue,
    ) -> None:
        self._exchange, self._run_group, self._kept = exchange, run_group, kept
        self._prompts, self._seed = prompts, seed
        self._next, self._open = kept.place.next, set(kept.place.open)

    @property
    def place(self) -> PromptCursor:
        """Where the drawing stands, with what is in flight or ready counted as open."""
        return PromptCursor(self._next, tuple(sorted(self._open)))

    def draws(self) -> Iterator[QueuedPrompt]:
        """What was open at the start, then new draws without end."""
        for number in sorted(self._open):
            yield QueuedPrompt(number, next(draw(self._prompts, seed=self._seed, start=number)))
        for prompt in draw(self._prompts, seed=self._seed, start=self._next):
            drawn = QueuedPrompt(self._next, prompt)
            self._open.add(drawn.number)
            self._next += 1
            yield drawn

    async def run(self, drawn: QueuedPrompt) -> FinishedGroup:
        """`run_group`; a draw whose group failed is used up, one that is cancelled is not."""
        try:
            return FinishedGroup(drawn.number, await self._run_group(drawn.prompt))
        except Exception:
            self._open.discard(drawn.number)
            raise

    def take(self, step: int, done: Sequence[FinishedGroup]) -> list[Group]:
        """Use groups for the batch of `step`; its place is written before it is published.

        Raises:
            StorageError: the place cannot be written.
        """
        self._open -= {each.number for each in done}
        _write_place(self._exchange, step, self.place)
        return [each.group for each in done]

    def hand_out(self) -> None:
        """Publish the kept batches again.

        Raises:
            StorageError: they cannot be written.
        """
        for message in self._kept.messages:
            print(message, flush=True)
        for batch, place in zip(self._kept.batches, self._kept.places, strict=True):
            _write_place(self._exchange, batch.step, place)
            self._exchange.publish_batch(batch)
        if self._kept.batches:
            steps = [batch.step for batch in self._kept.batches]
            print(f"batches of steps {steps[0]} to {steps[-1]} out of the checkpoint", flush=True)


def keep_queue(exchange: RolloutStore, step: int, checkpoint: Path) -> None:
    """Put the place after `step` and the later batches that are there into a checkpoint.

    Without a place, as when no orchestrator made the batches, nothing is kept.

    Raises:
        StorageError: the file system is full or failed.
    """
    folder = checkpoint / _FOLDER
    place = _place_path(exchange, step)
    with storage_errors("write", folder):
        while place.is_file():
            folder.mkdir(exist_ok=True)
            _link(place, folder / place.name)
            step += 1
            batch, place = exchange.batch_path(step), _place_path(exchange, step)
            if not batch.is_file():  # the place is written first
                return
            _link(batch, folder / batch.name)


def find_queue(
    checkpoint: Path | None, step: int, *, batch_size: int, async_level: int
) -> SavedQueue:
    """What a checkpoint after `step` has kept and is fit to be trained on; only reads.

    Args:
        batch_size: groups of a step; without a place every step is taken to have drawn so many.
        async_level: a batch with older samples than that is not handed out.
    """
    by_step = PromptCursor(step * batch_size)
    if checkpoint is None or not step:
        return SavedQueue(by_step)
    folder, messages = checkpoint / _FOLDER, list[str]()
    if not folder.is_dir():
        messages.append(f"{checkpoint.name} has no rollouts: prompts go on as if none had failed")
        return SavedQueue(by_step, messages=messages)
    batches: list[RolloutBatch] = []
    places: list[PromptCursor] = []
    try:
        place = _read_place(folder / f"{_name(step)}.json")
        for number in range(step + 1, step + 2 + async_level):
            if not (folder / f"{_name(number)}.npz").exists():
                break
            batch = _fit(read_batch(folder / f"{_name(number)}.npz"), number, async_level)
            place = _read_place(folder / f"{_name(number)}.json")
            batches.append(batch)
            places.append(place)
    except (StorageError, UsageError) as error:
        reason = str(error).splitlines()[0]
        messages.append(
            f"rollouts of {checkpoint.name} are used up to step "
            f"{step + len(batches)} only: {reason}"
        )
        if not places:
            place = _place_or(folder, step, by_step)
    return SavedQueue(place, batches, places, messages)


def _fit(batch: RolloutBatch, step: int, async_level: int) -> RolloutBatch:
    staleness = step - 1 - int(batch.versions.min())
    if batch.step != step or not 0 <= staleness <= async_level:
        raise UsageError(
            f"a batch of step {batch.step}, {staleness} versions old, lies under step {step}; "
            f"async_level is {async_level}"
        )
    return batch


def _place_or(folder: Path, step: int, otherwise: PromptCursor) -> PromptCursor:
    try:
        return _read_place(folder / f"{_name(step)}.json")
    except UsageError:
        return otherwise


def _read_place(path: Path) -> PromptCursor:
    body = read_object(path, "place in the prompts")
    following, unused = body.get("next"), body.get("open")
    numbers = [following, *unused] if isinstance(unused, list) else []
    if not numbers or not all(map(is_count, numbers)) or max(numbers) != following:
        raise UsageError(f"{path} is no place in the prompts: {json.dumps(body)[:80]}")
    found: list[int] = sorted(set(numbers))
    return PromptCursor(found.pop(), tuple(found))


def _write_place(exchange: RolloutStore, step: int, place: PromptCursor) -> None:
    write_json(_place_path(exchange, step), asdict(place))
    used = exchange.latest_version()
    for path in _place_path(exchange, step).parent.glob("step_*.json"):
        # The newest version's own place stays: a checkpoint after it may be in the making.
        if path.name < f"{_name(used)}.json":
            path.unlink(missing_ok=True)


def _place_path(exchange: RolloutStore, step: int) -> Path:
    return exchange.root / "places" / f"{_name(step)}.json"


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _link(source: Path, target: Path) -> None:
    """A second name for a file that is never changed, or a copy where there are no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync_file(target)
