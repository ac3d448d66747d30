"""`shakedown watch`: attach to a job that shakedown did not start, and say when it stalls."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shakedown.commands.arguments import CommandParser, above_zero, number
from shakedown.core.errors import ShakedownError, UsageError, did_you_mean
from shakedown.core.private import open_own
from shakedown.progress.patience import Patience

if TYPE_CHECKING:
    from shakedown.monitor.attach.actions import Actions, AlarmCommand
    from shakedown.monitor.attach.subjects import Subject
    from shakedown.monitor.attach.watcher import Options

EXAMPLES = (
    "shakedown watch --job 1234 --log watch.log --then scancel",
    "shakedown watch --match train.py --hosts n1,n2 --once",
)


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments."""
    parser.nagios = "--once"
    _subject_arguments(parser.add_argument_group("what to watch"))
    _watch_arguments(parser.add_argument_group("how"))
    _alarm_arguments(parser.add_argument_group("what an alarm does, beside its line"))


def _subject_arguments(what: argparse._ArgumentGroup) -> None:
    what.add_argument("--job", metavar="ID", help="a Slurm job of yours, on all its nodes")
    what.add_argument("--match", metavar="PATTERN", help="your processes, by command line")
    what.add_argument("--hosts", metavar="HOSTS", help="with --match: by ssh on n1,n2 or @FILE")
    what.add_argument(
        "--remote-python",
        metavar="FILE",
        help="with --hosts: their Python that has shakedown, where it is not the path of this one",
    )


def _watch_arguments(how: argparse._ArgumentGroup) -> None:
    how.add_argument(
        "--once",
        action="store_true",
        help="one round in one line, with Nagios' exit codes: 0 moves, 1 slow or not known, 2 hung "
        "or ended badly, 3 could not look (a wrong option, too)",
    )
    how.add_argument(
        "--interval", type=number(1, 86400), default=30.0, metavar="S", help="seconds between looks"
    )
    how.add_argument(
        "--cost",
        type=number(0.001, 100),
        default=0.5,
        metavar="PERCENT",
        help="of one core of a node that looks may take: where they take more, they are fewer",
    )
    how.add_argument(
        "--patience",
        type=above_zero,
        default=Patience.life,
        metavar="S",
        help="seconds without printing, reading, writing or CPU time after which stacks are read",
    )
    how.add_argument(
        "--stall",
        type=above_zero,
        default=Patience.work,
        metavar="S",
        help="the same of a job that computes; both are raised to three times the longest pause",
    )
    how.add_argument(
        "--out",
        type=Path,
        default=Path("shakedown-watch"),
        metavar="DIR",
        help="evidence of stalls; of --job a folder that all nodes see",
    )
    how.add_argument("--log", type=Path, metavar="FILE", help="every line into this file, too")


def _alarm_arguments(then: argparse._ArgumentGroup) -> None:
    then.add_argument("--then", choices=("nothing", "scancel"), default="nothing", help="the job")
    then.add_argument(
        "--command",
        metavar="WORDS",
        help="run this without a shell; {job} {state} {cause} {sentence} {ranks} {nodes} "
        "{evidence} {subject} {at} are filled in, `_` for what a shell would read; the exact "
        "texts are in $SHAKEDOWN_SENTENCE and so on",
    )
    then.add_argument(
        "--webhook",
        metavar="URL|@FILE",
        help="POST it as JSON to an https address; @FILE has it, where `ps` does not show it",
    )
    then.add_argument(
        "--webhook-secret",
        type=Path,
        metavar="FILE",
        help="sign the body: X-Shakedown-Signature: sha256=HMAC in hexadecimal",
    )


def run(args: argparse.Namespace) -> int:
    """Watch until the job ends, or look once.

    Raises:
        UsageError: an option cannot be used.
        CannotJudgeError: there is nothing that could be looked at.
    """
    if args.once:
        return _once(args)
    from shakedown.monitor.attach.watcher import Watcher

    subject, options, actions = _subject(args), _options(args), _actions(args)
    with _log(args.log) as write:
        return int(Watcher(subject, options, actions, write).run())


def _once(args: argparse.Namespace) -> int:
    from shakedown.monitor.attach.once import PluginAnswer, check_once

    try:
        _actions(args)
        gap = min(args.interval, 10.0)
        answer = check_once(_subject(args), _options(args), gap)
    except ShakedownError as error:
        answer = PluginAnswer("UNKNOWN", str(error.args[0]))
    print(answer, flush=True)
    return answer.code


def _options(args: argparse.Namespace) -> "Options":
    from shakedown.monitor.attach.watcher import Options

    patience = Patience(life=args.patience, work=args.stall)
    return Options(args.out, args.interval, args.cost / 100, patience)


def _subject(args: argparse.Namespace) -> "Subject":
    from shakedown.monitor.attach.subjects import Processes, SlurmJob
    from shakedown.monitor.collect.hosts import parse_hosts
    from shakedown.slurm.records import check_job_id

    if (args.job is None) == (args.match is None):
        raise UsageError("say what to watch: --job or --match", hint="shakedown watch --help")
    if args.job is not None:
        if args.hosts is not None:
            raise UsageError("--hosts goes with --match: --job asks Slurm for its own nodes")
        return SlurmJob(check_job_id(args.job))
    if args.then == "scancel":
        raise UsageError("--then scancel needs a job: --job ID", hint="squeue --me")
    try:
        re.compile(args.match)
    except re.error as error:
        raise UsageError(f"--match {args.match!r} is no regular expression: {error}") from error
    hosts = parse_hosts(args.hosts) if args.hosts is not None else ()
    return Processes(args.match, hosts, args.remote_python or sys.executable)


def _actions(args: argparse.Namespace) -> "Actions":
    from shakedown.monitor.attach.actions import Actions, Webhook, check_secret, webhook_address

    if args.webhook_secret is not None:
        if args.webhook is None:
            raise UsageError("--webhook-secret needs --webhook URL")
        check_secret(args.webhook_secret)
    webhook = args.webhook and Webhook(webhook_address(args.webhook), args.webhook_secret)
    command = _command(args.command) if args.command is not None else None
    return Actions(args.then == "scancel", command, webhook)


def _command(text: str) -> "Callable[[Mapping[str, str]], AlarmCommand]":
    """A command whose placeholders are known, each a word or a part of one.

    Raises:
        UsageError: it cannot be cut into words, or a placeholder is not known.
    """
    from shakedown.config.command import is_a_command, placeholders_in
    from shakedown.monitor.attach.actions import Alarm

    valid = Alarm.placeholders()
    for name in placeholders_in(text):
        if name not in valid:
            guess = did_you_mean(name, valid)
            raise UsageError(
                f"--command: unknown placeholder {{{name}}}{guess}; valid: {', '.join(valid)}"
            )
    try:
        if not is_a_command(text).strip():
            raise ValueError("it is empty")
    except ValueError as error:
        raise UsageError(f"--command {text[:80]!r}: {error}") from error
    return partial(_filled, text)


def _filled(text: str, values: Mapping[str, str]) -> "AlarmCommand":
    """An alarm's sentence is text of others: as words it is harmless, as variables exact."""
    from shakedown.config.command import environment_of, harmless, words_of

    words = words_of(text, {name: harmless(value) for name, value in values.items()})
    return words, environment_of(values)


@contextlib.contextmanager
def _log(path: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that prints a line and appends it to the log; a log that fails is said once.

    Raises:
        UsageError: the log cannot be opened.
    """
    if path is None:
        yield partial(print, flush=True)
        return
    try:
        handle = open_own(path, os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        raise UsageError(f"--log {path}: {error.strerror or error}") from error
    with os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace") as stream:

        def write(text: str) -> None:
            print(text, flush=True)
            try:
                stream.write(f"{text}\n")
                stream.flush()
            except OSError as error:  # a full disk ends no watch
                print(f"shakedown: --log {path}: {error.strerror or error}", file=sys.stderr)

        yield write
