"""Whose code a file is, as tracebacks and samplers name it."""

import json
from pathlib import Path

import pytest

from shakedown.agents.imports import last_frame
from shakedown.stacks.frames import owner_of

FILES = {
    "user": ["/srv/train.py", "my_data.py", "data/loader.py", "<stdin>", "/home/me/lib/x.py"],
    "library": [
        "/env/lib/python3.11/site-packages/datasets/arrow_dataset.py",
        "/usr/lib/python3/dist-packages/datasets/arrow_dataset.py",
        "datasets/arrow_dataset.py",
        "torch/nn/modules/module.py",
        "libc.so.6",
        "/srv/src/shakedown/monitor/watch.py",
    ],
    "standard": [
        json.__file__,
        json.decoder.__file__,
        "/usr/lib/python3.11/json/decoder.py",
        "json/decoder.py",
        "threading.py",
        "<frozen runpy>",
    ],
    "ours": ["shakedown/training/loop.py", "/srv/src/shakedown/training/loop.py"],
}


@pytest.mark.parametrize("owner", FILES)
def test_a_file_has_one_owner_by_whatever_name_a_tool_gives_it(owner: str) -> None:
    assert {file: owner_of(file) for file in FILES[owner]} == dict.fromkeys(FILES[owner], owner)


def test_an_exception_of_the_standard_library_is_named_by_the_line_that_called_it() -> None:
    def reward() -> object:
        return json.loads("{")

    with pytest.raises(ValueError, match="Expecting") as raised:
        reward()

    named = last_frame(raised.value)
    assert named.startswith(str(Path(__file__)))
    assert named.endswith('in reward: return json.loads("{")')
