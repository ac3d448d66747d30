"""What somebody else on this machine can do: a function that runs as another user."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

NOBODY = 65534


def as_nobody(act: Callable[[], Any]) -> Any:
    """What `act` returns, as JSON carries it, in a child process of an unprivileged user.

    A fork, not a program: this Python may lie where that user cannot reach it.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)  # nothing of pytest's runs twice
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        text = answers.read()
    os.waitpid(child, 0)
    return json.loads(text)
