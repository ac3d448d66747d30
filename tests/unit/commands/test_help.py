"""`--help` of every command and action: a sentence, two examples that parse, defaults said once."""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shakedown.cli import COMMANDS, command_parser
from shakedown.commands.arguments import CommandParser


def _parsers() -> Iterator[tuple[str, CommandParser]]:
    for name in COMMANDS:
        parser = command_parser(name)[1]
        yield name, parser
        for actions in parser._actions:
            if isinstance(actions, argparse._SubParsersAction):
                yield from ((f"{name} {action}", each) for action, each in actions.choices.items())


PARSERS = dict(_parsers())
every_parser = pytest.mark.parametrize("name", PARSERS)


def test_actions_are_among_the_parsers() -> None:
    assert {"serve start", "agent checks", "hang analyze"} <= set(PARSERS)


@every_parser
def test_help_begins_with_a_sentence_that_says_what_the_command_does(name: str) -> None:
    shown = PARSERS[name].format_help()
    _, description, *_ = shown.split("\n\n")

    assert re.fullmatch(r"[A-Z][a-z]+,? [^\n]{10,100}\.", description)


@every_parser
def test_help_ends_with_two_examples_that_the_parser_takes(name: str) -> None:
    parser = PARSERS[name]
    shown = parser.format_help().partition("\nexamples:\n")[2]
    examples = [line.strip() for line in shown.splitlines() if line.startswith("  shakedown")]

    assert len(examples) == 2
    for example in examples:
        words = shlex.split(example)
        own = f"shakedown {name}".split()
        assert words[: len(own)] == own
        parser.parse_args(words[len(own) :])


@every_parser
def test_help_says_no_default_twice(name: str) -> None:
    parser = PARSERS[name]
    formatter = parser._get_formatter()
    for action in parser._actions:
        shown = formatter._expand_help(action) if action.help else ""
        assert shown.count("default") <= 1, shown
        if action.option_strings and action.default:
            assert f"({action.default})" not in shown, shown


@every_parser
def test_help_says_no_default_that_nobody_can_type(name: str) -> None:
    shown = PARSERS[name].format_help()

    assert not re.search(r"default:\s+(None|False|True|\[\]|\))", shown)


def test_the_overview_names_every_command_and_loads_none() -> None:
    code = (
        "import sys\n"
        "from shakedown.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        "    names = [n for n in sys.modules if n.startswith('shakedown.commands.')]\n"
        "    print('loaded', names)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert done.stdout.splitlines()[-1] == "loaded ['shakedown.commands.arguments']"


@every_parser
def test_help_calls_every_number_n_or_by_a_name_of_its_own(name: str) -> None:
    shown = PARSERS[name].format_help()
    numbers = [
        action.option_strings[-1]
        for action in PARSERS[name]._actions
        if action.option_strings and action.metavar is None
        if type(action.default) in (int, float)
    ]
    assert all(f"{option} N" in shown for option in numbers)
