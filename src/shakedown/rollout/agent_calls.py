"""An agent's chat calls: the request to vLLM, the record of its reply, the reply to the agent.

Pure. The names of parameters and fields are those of vLLM's /v1/chat/completions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shakedown.core.errors import UsageError
from shakedown.inference.engines import Completion
from shakedown.inference.upstream import NEUTRAL
from shakedown.rollout.groups import TokenSequence

Body = dict[str, Any]

# Parameters that change the distribution that tokens are drawn from. Training needs the model's
# own at the stage's temperature, not narrowed. `seed` would make samples of a group equal (and
# kills vLLM on a CPU).
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "thinking_token_budget",
    "logits_processors",
    "logprob_token_ids",
    "watermarking",
    "length_penalty",
    "seed",
)
# Parameters that force tokens: log-probabilities of forced tokens are not the policy's.
_REFUSED = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "use_beam_search")
_READ = ("text", "refusal", "thinking", "reasoning")
_LENGTHS = ("max_completion_tokens", "max_tokens")


class RefusedCallError(UsageError):
    """A call that cannot be trained on; the agent is told as by OpenAI's error 400."""


@dataclass(frozen=True)
class Sampling:
    """The stage's own sampling: every call's temperature, and the most tokens of a reply.

    `max_tokens`: None: as the agent asks. `refused`: neutral values that the server does not take.
    """

    temperature: float
    max_tokens: int | None
    refused: frozenset[str] = frozenset()

    @property
    def parameters(self) -> Body:
        """The parameters of every call, complete, so that the server fills none in."""
        neutral = {name: value for name, value in NEUTRAL.items() if name not in self.refused}
        return {"temperature": self.temperature, **neutral}


@dataclass(frozen=True)
class ReplyOptions:
    """The fields that the agent wants in its replies; those for the recorder alone are hidden."""

    logprobs: bool
    token_ids: bool
    usage: bool
    stream: bool
    choices: int


@dataclass(frozen=True)
class Call:
    """One choice of one reply: prompt and sampled tokens, as the engine has them.

    `version`: the weights that wrote it; no update happens during a call.
    """

    prompt: list[int]
    completion: Completion
    version: int


def prepare(body: Mapping[str, Any], sampling: Sampling) -> tuple[Body, ReplyOptions, list[str]]:
    """The body to send instead of an agent's own.

    Returns:
        The body, what the agent wants of its reply, and what of its sampling is not as it asked,
        as `NAME VALUE` for people.

    Raises:
        RefusedCallError: it asks for something that cannot be trained on.
    """
    sent = {name: value for name, value in body.items() if value is not None}
    _refuse(sent)
    changed = [f"{name} {sent.pop(name)!r:.40}" for name in SAMPLING if name in sent]
    same = [name for name, value in sampling.parameters.items() if body.get(name) == value]
    changed = [each for each in changed if each.split(" ", 1)[0] not in same]
    asked = [int(sent.pop(name)) for name in _LENGTHS if _is_count(sent, name)]
    limits = [] if sampling.max_tokens is None else [sampling.max_tokens]
    if asked and limits and asked[0] > limits[0]:
        changed.append(f"max_tokens {asked[0]}")
    sent |= sampling.parameters
    if any(map(_is_strict, _objects(sent.get("tools")))):
        changed.append("strict tools")
        sent["tools"] = [_relaxed(tool) for tool in sent["tools"]]
    if asked or limits:
        sent.setdefault("max_tokens", min([*asked[:1], *limits]))
    options = sent.get("stream_options")
    if not isinstance(options, Mapping | None):
        raise RefusedCallError(f"stream_options is {options!r:.60}: expected a JSON object")
    wanted = ReplyOptions(
        logprobs=bool(sent.get("logprobs")),
        token_ids=bool(sent.get("return_token_ids")),
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        stream=bool(sent.get("stream")),
        choices=int(sent["n"]) if _is_count(sent, "n") else 1,
    )
    sent |= {"logprobs": True, "return_token_ids": True}
    sent["top_logprobs"] = sent.get("top_logprobs", 0) if wanted.logprobs else 0
    if wanted.stream:
        sent["stream_options"] = {**(options or {}), "include_usage": True}
    return sent, wanted, changed


def read_reply(reply: Any, version: int) -> list[Call]:
    """The calls of a reply that was not streamed.

    Raises:
        ValueError: token ids and log-probabilities are missing, or do not fit together.
    """
    record = StreamRecord(version)
    try:
        record.prompt = [int(token) for token in reply["prompt_token_ids"]]
        for choice in reply["choices"]:
            record.add_choice(choice)
        record.used = int(reply["usage"]["completion_tokens"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the engine's reply has no {error}") from error
    return record.calls()


def clean(reply: Body, wanted: ReplyOptions) -> Body:
    """A reply or a chunk as the agent asked for it."""
    shown = dict(reply)
    if not wanted.token_ids:
        shown.pop("prompt_token_ids", None)
    if wanted.stream and not wanted.usage:
        shown.pop("usage", None)
    shown["choices"] = [
        {name: value for name, value in choice.items() if _shown(name, wanted)}
        for choice in reply.get("choices", [])
    ]
    return shown


def _shown(name: str, wanted: ReplyOptions) -> bool:
    hidden = {"logprobs": not wanted.logprobs, "token_ids": not wanted.token_ids}
    return not hidden.get(name, False)


@dataclass
class _Choice:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: str = ""


@dataclass
class StreamRecord:
    """Collects the chunks of one streamed reply; `used`: the engine's own count of tokens."""

    version: int
    prompt: list[int] | None = None
    used: int | None = None
    choices: dict[int, _Choice] = field(default_factory=dict)

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take a chunk in.

        Raises:
            ValueError: it is not of the documented form.
        """
        try:
            if chunk.get("prompt_token_ids") is not None:
                self.prompt = [int(token) for token in chunk["prompt_token_ids"]]
            for choice in chunk.get("choices") or ():
                self.add_choice(choice)
            if chunk.get("usage"):
                self.used = int(chunk["usage"]["completion_tokens"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a chunk of the engine's stream has no {error}") from error

    def add_choice(self, choice: Mapping[str, Any]) -> None:
        """Take one choice of a reply or of a chunk in."""
        recorded = self.choices.setdefault(int(choice["index"]), _Choice())
        recorded.tokens += [int(token) for token in choice.get("token_ids") or ()]
        content = (choice.get("logprobs") or {}).get("content") or ()
        recorded.logprobs += [float(token["logprob"]) for token in content]
        message = choice.get("delta") or choice.get("message") or {}
        recorded.text += message.get("content") or ""
        recorded.finish = str(choice.get("finish_reason") or recorded.finish)

    def finished(self, choices: int) -> bool:
        """Whether each of so many choices has come to its end."""
        return len(self.choices) >= choices and all(each.finish for each in self.choices.values())

    def calls(self) -> list[Call]:
        """The recorded calls.

        Raises:
            ValueError: token ids are missing, or numbers of tokens differ.
        """
        tokens = sum(len(choice.tokens) for choice in self.choices.values())
        logprobs = sum(len(choice.logprobs) for choice in self.choices.values())
        if not self.prompt or not tokens:
            raise ValueError("the engine returned no token ids")
        if any(len(each.tokens) != len(each.logprobs) for each in self.choices.values()):
            raise ValueError(
                f"the engine returned {tokens} tokens and {logprobs} log-probabilities"
            )
        if self.used is not None and self.used != tokens:
            raise ValueError(f"the engine sampled {self.used} tokens and returned {tokens}")
        return [
            Call(
                list(self.prompt),
                Completion(each.tokens, each.logprobs, each.text, each.finish),
                self.version,
            )
            for _, each in sorted(self.choices.items())
        ]


def joined(calls: Sequence[Call]) -> list[TokenSequence]:
    """An episode's calls as sequences, in order of their first call.

    A call whose prompt begins with all of an earlier sequence, the sampled tokens included, goes
    on with it (the longest that fits): what stands between is read and not trained. Any other
    call, such as one whose history was written anew, begins a sequence of its own. Every sampled
    token is trained exactly once.
    """
    sequences: list[TokenSequence] = []
    for call in calls:
        fitting = [index for index, each in enumerate(sequences) if _continues(each, call)]
        index = max(fitting, key=lambda index: len(sequences[index].tokens), default=None)
        if index is None:
            sequences.append(_extended(TokenSequence([], [], [], call.version, calls=0), call))
        else:
            sequences[index] = _extended(sequences[index], call)
    return sequences


def _continues(sequence: TokenSequence, call: Call) -> bool:
    return call.prompt[: len(sequence.tokens)] == sequence.tokens


def _extended(sequence: TokenSequence, call: Call) -> TokenSequence:
    read, sampled = call.prompt[len(sequence.tokens) :], call.completion
    return TokenSequence(
        tokens=[*sequence.tokens, *read, *sampled.tokens],
        mask=[*sequence.mask, *[False] * len(read), *[True] * len(sampled.tokens)],
        logprobs=[*sequence.logprobs, *[0.0] * len(read), *sampled.logprobs],
        version=min(sequence.version, call.version),
        calls=sequence.calls + 1,
    )


def _refuse(body: Mapping[str, Any]) -> None:
    for message in _objects(body.get("messages")):
        for part in _objects(message.get("content")):
            if part.get("type", "text") not in _READ:
                raise RefusedCallError(
                    f"content of the type {part['type']!r:.60} cannot be trained on: "
                    "text alone is recorded",
                    hint="send text",
                )
    for name in _faults(body):
        raise RefusedCallError(
            f"{name} forces tokens upon the model; their log-probabilities are not the policy's, "
            "so that the call cannot be trained on",
            hint="leave it out, and judge the form of the answer in the reward",
        )


def _faults(body: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name in _REFUSED if body.get(name))
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type", "text") != "text":
        yield "response_format"
    if body.get("tool_choice", "auto") not in ("auto", "none"):
        yield "tool_choice"


def _objects(values: Any) -> list[Body]:
    """The JSON objects in what should be an array; the engine says what is wrong with others."""
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def _is_strict(tool: Body) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and bool(function.get("strict"))


def _relaxed(tool: Any) -> Any:
    """A tool whose schema the engine does not force upon the model."""
    if not (isinstance(tool, dict) and _is_strict(tool)):
        return tool
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _is_count(body: Mapping[str, Any], name: str) -> bool:
    """Whether it is a valid count; other values are left to the engine, which rejects them."""
    value = body.get(name)
    return isinstance(value, int) and not isinstance(value, bool)
