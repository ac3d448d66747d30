"""Which prompts are drawn and which batches wait for the trainer, so that both survive a restart.

exchange/places/step_000007.json   where the drawing stood when the batch of step 7 was made
checkpoints/step_000007/rollouts/  after step 7: its cursor, and the later batches with theirs
    step_000007.json
    step_000008.npz step_000008.json

A group is used up when it is in a batch, was replaced or has failed. What was in flight, or ready
and not yet in a batch, is drawn again by the one who goes on: no prompt is drawn twice or lost.
"""

import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shakedown.core.errors import StorageError, UsageError
from shakedown.core.files import read_json_as, write_json
from shakedown.core.folders import storage_errors, sync_file
from shakedown.core.private import make_folders
from shakedown.rollout.batch import RolloutBatch, read_batch
from shakedown.rollout.groups import Group, Prompt, draw
from shakedown.rollout.store import Count, RolloutStore

_FOLDER = "rollouts"


@dataclass(frozen=True)
class PromptCursor:
    """`next`: number of the next draw, from 0 over all epochs; `open`: earlier ones not used up."""

    next: Count
    open: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if self.open and max(self.open) >= self.next:
            raise ValueError(f"open: {max(self.open)} is not before next, {self.next}")


@dataclass(frozen=True)
class SavedQueue:
    """A checkpoint's rollouts for the steps after it: batches in order, each with its cursor.

    `cursor`: after the last of them. `messages`: for people.
    """

    cursor: PromptCursor
    batches: Sequence[RolloutBatch] = ()
    cursors: Sequence[PromptCursor] = ()
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
    """The orchestrator's prompts in seeded order; keeps account of each draw.

    Args:
        run_group: makes the group of a prompt.
        saved: of the checkpoint that the stage goes on from.
        longest: tokens of a prompt that the server answers; None: any. Draws of longer ones are
            used up at once, so that the order of all others stays.
        refill: groups whose rewards are all equal that are replaced for one batch; further ones
            come into it.

    `left_out`: draws of longer prompts so far. `replaced`: groups so far.
    """

    def __init__(
        self,
        store: RolloutStore,
        prompts: Sequence[Prompt],
        run_group: Callable[[Prompt], Awaitable[Group]],
        *,
        seed: int,
        saved: SavedQueue,
        longest: int | None = None,
        refill: int = 0,
    ) -> None:
        self._refill, self._replaceable, self.replaced = refill, refill, 0
        self._longest, self.left_out = longest, 0
        self._store, self._run_group, self._saved = store, run_group, saved
        self._prompts, self._seed = prompts, seed
        self._next, self._open = saved.cursor.next, set(saved.cursor.open)

    @property
    def cursor(self) -> PromptCursor:
        """Where the drawing stands, with what is in flight or ready counted as open."""
        return PromptCursor(self._next, tuple(sorted(self._open)))

    def draws(self) -> Iterator[QueuedPrompt]:
        """The draws that were open at the start, then new ones without end."""
        # `sorted` copies: groups that end meanwhile change the set.
        for number in sorted(self._open):
            prompt = next(draw(self._prompts, seed=self._seed, start=number))
            if self._fits(prompt):
                yield QueuedPrompt(number, prompt)
            else:
                self._open.discard(number)
        for prompt in draw(self._prompts, seed=self._seed, start=self._next):
            queued = QueuedPrompt(self._next, prompt)
            self._next += 1
            if self._fits(prompt):
                self._open.add(queued.number)
                yield queued

    def _fits(self, prompt: Prompt) -> bool:
        fits = self._longest is None or len(prompt.tokens) <= self._longest
        self.left_out += not fits
        return fits

    async def run(self, queued: QueuedPrompt) -> FinishedGroup | None:
        """`run_group`; None where the group teaches nothing and another one is to be drawn.

        A draw whose group failed is used up, one that is cancelled is not.
        """
        try:
            group = await self._run_group(queued.prompt)
        except Exception:  # not CancelledError: what was in flight at the end is drawn again
            self._open.discard(queued.number)
            raise
        if self._replaceable and group.flat:
            self._open.discard(queued.number)
            self._replaceable -= 1
            self.replaced += 1
            return None
        return FinishedGroup(queued.number, group)

    def take(self, step: int, finished: Sequence[FinishedGroup]) -> list[Group]:
        """Use groups for the batch of `step`; its cursor is written before it is published.

        Raises:
            StorageError: the cursor cannot be written.
        """
        self._open -= {each.number for each in finished}
        self._replaceable = self._refill
        _write_cursor(self._store, step, self.cursor)
        return [each.group for each in finished]

    def publish_saved(self) -> None:
        """Publish the saved batches again.

        Raises:
            StorageError: they cannot be written.
        """
        for message in self._saved.messages:
            print(message, flush=True)
        for batch, cursor in zip(self._saved.batches, self._saved.cursors, strict=True):
            _write_cursor(self._store, batch.step, cursor)
            self._store.publish_batch(batch)
        if self._saved.batches:
            steps = [batch.step for batch in self._saved.batches]
            print(f"batches of steps {steps[0]} to {steps[-1]} from the checkpoint", flush=True)


def longest_prompt(prompts: Sequence[Prompt], room: int | None, max_tokens: int) -> int | None:
    """The longest prompt, in tokens, that leaves room for an answer; longer ones are reported.

    Args:
        room: tokens of prompt and answer that the server takes; None: not known.

    Raises:
        UsageError: no prompt leaves it.
    """
    longest = None if room is None else room - max_tokens
    over = [len(p.tokens) for p in prompts if longest is not None and len(p.tokens) > longest]
    if over:
        told = (
            f"{len(over)} of {len(prompts)} prompts are longer than {longest} tokens (up to "
            f"{max(over)}): the server takes {room}, and max_tokens is {max_tokens}"
        )
        if len(over) == len(prompts):
            raise UsageError(told, hint="raise serve.max_model_len, or lower grpo.max_tokens")
        print(f"{told}; they are left out", flush=True)
    return longest


def keep_queue(store: RolloutStore, step: int, checkpoint: Path) -> None:
    """Put the cursor after `step` and the later batches that are there into a checkpoint.

    Without a cursor, as when no orchestrator made the batches, nothing is kept.

    Raises:
        StorageError: the file system is full or failed.
    """
    folder = checkpoint / _FOLDER
    cursor = _cursor_path(store, step)
    with storage_errors("write", folder):
        while cursor.is_file():
            make_folders(folder)
            _link(cursor, folder / cursor.name)
            step += 1
            batch, cursor = store.batch_path(step), _cursor_path(store, step)
            if not batch.is_file():  # the cursor is written first
                return
            _link(batch, folder / batch.name)


def find_queue(
    checkpoint: Path | None, step: int, *, batch_size: int, async_level: int
) -> SavedQueue:
    """The queue that a checkpoint after `step` has kept and that can be trained on; only reads.

    Args:
        batch_size: groups of a step; without a cursor every step is taken to have drawn so many.
        async_level: a batch with older samples than that is not handed out.
    """
    by_step = PromptCursor(step * batch_size)
    if checkpoint is None or not step:
        return SavedQueue(by_step)
    folder, messages = checkpoint / _FOLDER, list[str]()
    if not folder.is_dir():
        messages.append(
            f"{checkpoint.name} has no rollouts: prompts continue as if none had failed"
        )
        return SavedQueue(by_step, messages=messages)
    batches: list[RolloutBatch] = []
    cursors: list[PromptCursor] = []
    try:
        cursor = _read_cursor(folder / f"{_name(step)}.json")
        # The staleness rule lets at most async_level + 1 batches wait for a trainer at `step`.
        for number in range(step + 1, step + 2 + async_level):
            if not (folder / f"{_name(number)}.npz").exists():
                break
            batch = _fit(read_batch(folder / f"{_name(number)}.npz"), number, async_level)
            cursor = _read_cursor(folder / f"{_name(number)}.json")
            batches.append(batch)
            cursors.append(cursor)
    except (StorageError, UsageError) as error:
        reason = str(error).splitlines()[0]
        messages.append(
            f"rollouts of {checkpoint.name} are used up to step "
            f"{step + len(batches)} only: {reason}"
        )
        # `cursor` is not set where reading it is what failed.
        if not cursors:
            cursor = _cursor_or(folder, step, by_step)
    return SavedQueue(cursor, batches, cursors, messages)


def _fit(batch: RolloutBatch, step: int, async_level: int) -> RolloutBatch:
    staleness = step - 1 - int(batch.versions.min())
    if batch.step != step or not 0 <= staleness <= async_level:
        raise UsageError(
            f"a batch of step {batch.step}, {staleness} versions old, is stored under step {step}; "
            f"async_level is {async_level}"
        )
    return batch


def _cursor_or(folder: Path, step: int, otherwise: PromptCursor) -> PromptCursor:
    try:
        return _read_cursor(folder / f"{_name(step)}.json")
    except UsageError:
        return otherwise


def _read_cursor(path: Path) -> PromptCursor:
    return read_json_as(PromptCursor, path, "place in the prompts")


def _write_cursor(store: RolloutStore, step: int, cursor: PromptCursor) -> None:
    write_json(_cursor_path(store, step), asdict(cursor))
    used = store.latest_version()
    for path in _cursor_path(store, step).parent.glob("step_*.json"):
        # The newest version's own cursor stays: a checkpoint after it may be in the making. Names
        # with leading zeros compare as their numbers do.
        if path.name < f"{_name(used)}.json":
            path.unlink(missing_ok=True)


def _cursor_path(store: RolloutStore, step: int) -> Path:
    return store.root / "places" / f"{_name(step)}.json"


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _link(source: Path, target: Path) -> None:
    """A second name for a file that is never changed, or a copy where there are no links."""
    try:
        os.link(source, target)  # nothing to flush: atomic writes have flushed the file
    except OSError:
        shutil.copyfile(source, target)
        sync_file(target)
