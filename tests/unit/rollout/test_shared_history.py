"""What was sampled for one row is found in another row's messages, and nothing that looks alike."""

import json
from typing import Any

from shakedown.inference.engines import Completion
from shakedown.rollout.agent_calls import Call
from shakedown.rollout.shared_history import SharedHistory

LONG = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep for a while."
SHORT = "It is surely forty-two."
Message = dict[str, Any]


def said(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def reply(text: str) -> Call:
    return Call([1], Completion([2], [-0.1], text, "stop"), 0)


def history_with(text: str, asked: str = "question", row: Any = "first") -> SharedHistory:
    """An episode of another row has this reply."""
    history = SharedHistory()
    history.begin("a", "sample 0 of row 0", json.dumps({"row": row}))
    history.asked("a", [said("user", asked)])
    history.sampled("a", [reply(text)])
    return history


def fault(history: SharedHistory, *messages: Message, row: Any = "second", own: str = "") -> str:
    history.begin("b", "sample 3 of row 1", json.dumps({"row": row}))
    if own:
        history.asked("b", [said("user", "my own")])
        history.sampled("b", [reply(own)])
    history.asked("b", list(messages))
    return history.end("b")


def test_a_reply_of_another_row_is_found_and_both_episodes_are_named() -> None:
    found = fault(history_with(LONG), said("user", f"Before: {LONG} And now?"))

    assert "a message of sample 3 of row 1 contains text sampled for sample 0 of row 0" in found
    assert "The quick brown fox" in found


def test_a_short_one_is_found_as_a_whole_message_of_the_assistant_alone() -> None:
    assert fault(history_with(SHORT), said("assistant", SHORT))
    assert not fault(history_with(SHORT), said("user", f"Is it so? {SHORT}"))


def test_text_in_parts_of_a_message_is_looked_at() -> None:
    assert fault(history_with(LONG), said("user", [{"type": "text", "text": LONG}]))


def test_a_reply_counts_after_its_episode_has_ended() -> None:
    history = history_with(LONG)
    assert history.end("a") == ""

    assert fault(history, said("assistant", LONG))


def test_samples_of_the_same_row_are_not_compared() -> None:
    assert not fault(history_with(LONG, row="same"), said("assistant", LONG), row="same")


def test_an_own_reply_that_equals_another_rows_is_the_episodes_own() -> None:
    assert not fault(history_with(LONG), said("assistant", LONG), own=LONG)


def test_what_stands_in_the_row_itself_is_no_others() -> None:
    text = f'"{LONG}"\nas they say'  # JSON writes both characters otherwise

    assert not fault(history_with(text), said("user", text), row=text)


def test_a_reply_that_repeats_its_prompt_is_no_sign() -> None:
    assert not fault(history_with(LONG, asked=f"Repeat: {LONG}"), said("system", LONG))


def test_few_characters_again_and_again_and_a_few_words_are_accidents() -> None:
    assert not fault(history_with("abc " * 40), said("assistant", "abc " * 40))
    assert not fault(history_with("Yes, it is."), said("assistant", "Yes, it is."))


def test_messages_of_any_form_are_taken() -> None:
    odd_ones: list[Message] = [{"role": 3}, {"content": [None, {"text": 4}]}, {"content": {}}]
    for odd in odd_ones:
        assert fault(history_with(LONG), odd) == ""
    history = history_with(LONG)
    history.asked("a", "no list")
    history.asked("nobody", [said("user", LONG)])
    history.sampled("nobody", [reply(LONG)])
