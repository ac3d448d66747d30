"""The log of an episode's calls: what is kept whole, what is cut, what is only counted."""

import json
from typing import Any

import pytest

from shakedown.agents.call_log import LONGEST_TEXT, MOST_CALLS, MOST_MESSAGES, ROOM, CallLog
from shakedown.rollout.agent_relay import messages_of


def message(text: str, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def test_a_call_that_goes_on_tells_only_what_is_new() -> None:
    log = CallLog("proxy")
    history = [message("be brief", "system"), message("one")]
    log.add_messages(log.begin("chat/completions"), history)

    further = log.begin("chat/completions")
    log.add_messages(further, [*history, message("<1>", "assistant"), message("and?")])

    assert further.repeats == 2
    assert [each["content"] for each in further.messages] == ["<1>", "and?"]


def test_a_history_that_was_rewritten_is_told_from_the_change_on() -> None:
    log = CallLog("proxy")
    log.add_messages(log.begin("messages"), [message("one"), message("two")])

    other = log.begin("messages")
    log.add_messages(other, [message("one"), message("2"), message("two")])

    assert (other.repeats, [m["content"] for m in other.messages]) == (1, ["2", "two"])


def test_a_long_text_keeps_its_beginning_and_end_and_says_how_much_is_missing() -> None:
    log = CallLog("proxy")
    call = log.begin("chat/completions")

    log.add_messages(call, [message("a" * LONGEST_TEXT + "b" * 5000, name="x")])

    told = call.messages[0]
    assert told["content"].startswith("aaa")
    assert told["content"].endswith("bbb")
    assert "[5,000 characters cut]" in told["content"]
    assert json.loads(told["more"]) == {"name": "x"}


def test_an_episode_takes_no_more_room_than_it_may() -> None:
    log = CallLog("proxy")
    for number in range(MOST_CALLS + 7):
        messages = [message(f"{number} {turn} " + "x" * 10_000) for turn in range(150)]
        log.add_messages(log.begin("chat/completions"), messages)

    told = log.to_json()

    assert (len(told["calls"]), told["left_out"]) == (MOST_CALLS, 7)
    assert len(told["calls"][0]["messages"]) == MOST_MESSAGES
    assert told["calls"][0]["messages_left_out"] == 150 - MOST_MESSAGES
    assert len(json.dumps(told)) < ROOM + MOST_CALLS * MOST_MESSAGES * 200
    assert "10,0" in told["calls"][-1]["messages"][-1]["content"]


def test_what_is_nested_deeply_is_kept_as_text() -> None:
    log = CallLog("proxy")
    call = log.begin("chat/completions")
    deep = json.loads("[" * 900 + "]" * 900)

    log.add_messages(call, [{"role": "user", "content": deep}])

    assert call.messages == [{"content": json.dumps({"role": "user", "content": deep})}]


def test_a_call_without_an_answer_says_so() -> None:
    log = CallLog("relay")
    log.begin("chat/completions")

    told = json.loads(json.dumps(log.to_json()))

    assert told["seen_by"] == "relay"
    assert "no whole reply" in told["calls"][0]["error"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [message("a")], "system": "s"}, ["s", "a"]),
        ({"input": "a", "instructions": "s"}, ["s", "a"]),
        ({"input": [message("a")]}, ["a"]),
        ([], []),
        ("[[" * 100_000, []),
        ("no json", []),
    ],
)
def test_messages_are_found_in_the_body_of_each_protocol(body: Any, expected: list[str]) -> None:
    content = body if isinstance(body, str) else json.dumps(body)

    found = messages_of(content.encode())

    assert [each["content"] for each in found] == expected
