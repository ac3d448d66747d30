"""How to continue a run: its command, from the `workflow.json` in its folder.

Code that prints what to run next calls `next_command`, as a bare `snakemake` runs the demo.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shakedown.core.errors import ShakedownError
from shakedown.core.files import json_as, read_object, write_json
from shakedown.core.paths import RunPaths, StagePaths

WORKFLOW_SCHEMA = "shakedown/workflow/1"
_STAGE_SCHEMA = "shakedown/stage-command/1"
# Options that would redo finished work if given again.
_ONCE = frozenset({"-f", "--force", "-F", "--forceall", "--unlock", "--restart"})
_ONCE_WITH_WORDS = frozenset({"-R", "--forcerun"})
_PROFILE = "SNAKEMAKE_PROFILE"


@dataclass(frozen=True)
class ProgramCall:
    """A program as it was called in `folder`: the `words` after its name, in order.

    `overlays`: the config files, each overriding the ones before it. `targets`: the requested
    files. `profile`: the one named by the environment.
    """

    folder: str = ""
    words: Sequence[str] = ()
    overlays: Sequence[str] = ()
    targets: Sequence[str] = ()
    profile: str = ""

    @classmethod
    def snakemake(
        cls, words: Sequence[str], overlays: Iterable[Path], targets: Iterable[str], folder: Path
    ) -> "ProgramCall":
        """The call of this process, which is a snakemake run in `folder`."""
        return cls(
            folder=str(folder),
            words=list(words),
            overlays=[str(path) for path in overlays],
            targets=sorted(targets),
            profile=os.environ.get(_PROFILE, ""),
        )

    def line(self, program: str, *, further: bool = False) -> str:
        """The command line, to paste into a shell in any folder.

        Args:
            further: beyond the requested targets.
        """
        left_out = self.targets if further else ()
        words = [word for word in _lasting(self.words) if word not in left_out]
        if self.profile and not any(word.startswith("--profile") for word in words):
            words = ["--profile", self.profile, *words]
        away = os.path.realpath(self.folder) != os.path.realpath(Path.cwd())
        go = f"cd {shlex.quote(self.folder)} && " if away else ""
        return f"{go}{shlex.join([program, *words])}"


def _lasting(words: Sequence[str]) -> Iterator[str]:
    """The words without those meant for one call only."""
    skipped = False
    for word in words:
        skipped = word in _ONCE_WITH_WORDS or (skipped and not word.startswith("-"))
        if not skipped and word not in _ONCE:
            yield word


def next_command(run: Path, *, further: bool = False) -> str:
    """The command that continues the run of a folder; empty if unknown.

    Args:
        further: also if all requested targets exist.
    """
    paths = RunPaths(run)
    command = _recorded(paths.workflow, WORKFLOW_SCHEMA)
    if command is not None:
        return command.line("snakemake", further=further)
    # Written by an older version or by hand: the config is complete and overrides nothing.
    if paths.config.is_file():
        return begin_command([paths.config])
    return ""


def stage_command(stage: StagePaths) -> str:
    """As `next_command`, for a stage that may have been run on its own."""
    alone = _recorded(stage.command, _STAGE_SCHEMA)
    of_run = next_command(stage.root.parent.parent)
    return of_run or (alone.line("shakedown") if alone else "")


def restart_command(stage: StagePaths) -> str:
    """The command that trains the stage again from its first step."""
    alone = _recorded(stage.command, _STAGE_SCHEMA)
    again = alone.line("shakedown") if alone else f"shakedown train {shlex.quote(stage.root.name)}"
    return f"{again} --restart"


def note_stage_command(stage: StagePaths, words: Sequence[str], overlays: Iterable[Path]) -> None:
    """Save the command of a stage, for when it is to be continued.

    Raises:
        StorageError: it cannot be written.
    """
    command = ProgramCall(str(Path.cwd()), list(words), [str(path) for path in overlays])
    write_json(stage.command, {"schema": _STAGE_SCHEMA, "command": asdict(command)})


def begin_command(overlays: Iterable[Path], *more: str) -> str:
    """The command that starts a run with these config files, each overriding the ones before it."""
    files = list(map(str, overlays))
    # Last, because --configfile takes all words up to the next option.
    return shlex.join(["snakemake", *more, *(["--configfile", *files] if files else [])])


def cluster_command(stage: StagePaths) -> str:
    """The command that runs the stage's workflow on a cluster."""
    known = _recorded(stage.command, _STAGE_SCHEMA)
    run = _recorded(RunPaths(stage.root.parent.parent).workflow, WORKFLOW_SCHEMA) or known
    return begin_command(map(Path, run.overlays if run else ()), "--profile", "profiles/slurm")


def fixed_then(command: str, what: str = "fix the cause") -> str:
    """Advice after a failure, and the command to run then."""
    return f"{what}, then: {command}" if command else f"{what}, then run the same command again"


def _recorded(path: Path, schema: str) -> ProgramCall | None:
    """The call; None without a file that only this user could have written."""
    try:
        body = read_object(path, "record of a command", schema=schema, control=True)
        return json_as(ProgramCall, body["command"])
    except (ShakedownError, LookupError, ValueError, TypeError):
        return None
