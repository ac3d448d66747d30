"""OpenAI's completions: the one protocol that takes a prompt as token ids, and no chat.

The names are those of vLLM's /v1/completions, which the call goes to as one.
"""

from typing import Any

from shakedown.rollout.agent_calls import SAMPLING, Body, RefusedCallError
from shakedown.rollout.protocols.base import COMMON, check_names, one_of
from shakedown.rollout.protocols.chat import ChatReply

PATH = "/v1/completions"
_AS_THEY_ARE = {"model", "max_tokens", "n", "stop", "stop_token_ids", "ignore_eos"}
_AS_THEY_ARE |= {"skip_special_tokens", "return_tokens_as_token_ids", "return_token_ids"}
_READ = {"prompt", "logprobs", "stream", "use_beam_search", "echo"}
_KNOWN = frozenset({*_AS_THEY_ARE, *_READ, *COMMON, *SAMPLING})


def to_chat(body: Body) -> Body:
    """The parameters that completions and chat share, and the prompt.

    Raises:
        RefusedCallError: it cannot be recorded, or is malformed.
    """
    check_names(body, _KNOWN)
    for name in ("stream", "use_beam_search", "echo"):
        one_of(body.get(name), (None, False), name)
    prompt, shown = body.get("prompt"), body.get("logprobs")
    if not _is_one_prompt(prompt):
        raise RefusedCallError(f"prompt is {prompt!r:.60}: expected one text, or its token ids")
    sent = {name: body[name] for name in (*_AS_THEY_ARE, *SAMPLING) if name in body}
    return {**sent, "prompt": prompt, "logprobs": shown is not None, "top_logprobs": shown or 0}


def to_engine(body: Body) -> Body:
    """The engine's completion instead of a chat's parameters."""
    sent = {name: value for name, value in body.items() if name != "top_logprobs"}
    return {**sent, "logprobs": body["top_logprobs"]}  # 0: of the sampled token alone


def from_engine(reply: Body) -> Body:
    """The engine's reply as a chat's, which is what the recorder reads.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is malformed.
    """
    choices = [_chat_choice(choice) for choice in reply["choices"]]
    prompts = [choice["prompt_token_ids"] for choice in reply["choices"]]
    return {**reply, "choices": choices, "prompt_token_ids": prompts[0] if prompts else None}


def _chat_choice(choice: Body) -> Body:
    told = (choice["logprobs"] or {}).get("token_logprobs") or ()
    logprobs = {**(choice["logprobs"] or {}), "content": [{"logprob": value} for value in told]}
    return {**choice, "logprobs": logprobs, "message": {"content": choice["text"]}}


def _is_one_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    ids = isinstance(prompt, list) and bool(prompt)
    return ids and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)


class CompletionsReply(ChatReply):
    """A reply of completions, never streamed: `to_chat` refuses that."""

    def whole(self, reply: Body) -> Body:
        """The engine's reply without the fields that the agent did not ask for."""
        choices = [_own_choice(choice) for choice in reply["choices"]]
        return {**reply, "choices": choices}


def _own_choice(choice: Body) -> Body:
    shown = {name: value for name, value in choice.items() if name != "message"}
    if "token_ids" not in shown:
        shown.pop("prompt_token_ids", None)
    given = shown.get("logprobs") or {}
    logprobs = {name: value for name, value in given.items() if name != "content"}
    return {**shown, "logprobs": logprobs or None}
