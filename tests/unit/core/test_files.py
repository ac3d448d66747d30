"""Dataclasses in JSON files: read strictly, and what does not fit is named."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from shakedown.core.errors import StorageError, UsageError
from shakedown.core.files import json_as, read_json_as


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whole:
    seconds: float
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError("seconds are below 0")


def test_nested_dataclasses_and_tuples_come_back_out_of_json() -> None:
    body = {"seconds": 2, "parts": [{"name": "a", "sizes": [1, 2]}]}

    assert json_as(Whole, body) == Whole(2.0, (Part("a", (1, 2)),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "seconds: missing"),
        ('{"seconds": "1"}', "seconds: Input should be a valid number, got '1'"),
        ('{"seconds": true}', "seconds: Input should be a valid number, got True"),
        ('{"seconds": 1e999}', "seconds: Input should be a finite number"),
        ('{"seconds": NaN}', "seconds: Input should be a finite number"),
        (f'{{"seconds": {10**400}}}', "seconds: Input should be a finite number"),
        ('{"seconds": -1}', "seconds are below 0"),
        ('{"seconds": 1, "part": []}', "part: unknown key"),
        ('{"seconds": 1, "parts": [{"name": "a", "size": 1}]}', r"parts\.0\.size: unknown key"),
        ('{"seconds": 1, "parts": [{"name": 1}]}', r"parts\.0\.name: Input should be"),
        ('{"seconds": 1, "x": ' + "[" * 900 + "]" * 900 + "}", "whole.json is not a valid whole"),
    ],
)
def test_what_does_not_fit_is_named_with_its_file_and_key(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "whole.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match=said) as refusal:
        read_json_as(Whole, path, "whole")
    assert "whole.json is not a valid whole" in str(refusal.value)
    with pytest.raises(StorageError, match=said):
        read_json_as(Whole, path, "whole", error_class=StorageError)


def test_keys_of_another_version_are_passed_over_when_asked_to() -> None:
    body = {"seconds": 1, "new": 1, "parts": [{"name": "a", "new": 2}]}

    assert json_as(Whole, body, unknown="ignore") == Whole(1.0, (Part("a"),))


def test_half_a_surrogate_pair_is_a_question_mark() -> None:
    assert json_as(Part, json.loads('{"name": "cut \\ud83d"}')) == Part("cut ?")
