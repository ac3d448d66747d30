"""Train and held-out rows, and the reward that judges answers to them."""

from collections.abc import Iterator
from pathlib import Path

from shakedown.agents.rewards import REWARDS
from shakedown.core.verdict import Finding
from shakedown.data_sources import FORMATS, AnsweredRow, DataSource, parse_source
from shakedown.training.assets import DEMO
from shakedown.training.lint_rules.inputs import Inputs, advice, fault

# Answers as the known data sets ask for them; `{}` is the row's own.
FORMS = (
    "{}",
    "\\boxed{{{}}}",
    "#### {}",
    "[{}]",
    "<answer>{}</answer>",
    "<think></think>\\boxed{{{}}}",
)
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_FEW = 20  # rows: enough to tell a data set from its first row


def rows_can_be_read(inputs: Inputs) -> Iterator[Finding]:
    """The first rows are of the form that the stages read."""
    data = inputs.config.data
    for key, rows in (("train", inputs.train), ("heldout", inputs.heldout)):
        if rows.fault:
            expected = "rows with `messages` and `answer`, or of data.format"
            yield fault("data", f"data.{key}", getattr(data, key), expected, rows.fault)


def heldout_is_apart(inputs: Inputs) -> Iterator[Finding]:
    """Held-out data is not trained on; nothing is measured with eval_samples: 0."""
    data = inputs.config.data
    if not any(stage.eval_samples for stage in inputs.config.own_stages.values()):
        return
    train = parse_source(data.train, form=data.format)
    heldout = parse_source(data.heldout, form=data.format, heldout=True)
    expected = "other rows than data.train"
    if data.heldout != DEMO and _same(train, heldout):
        remedy = "held-out accuracy would measure memory; to measure none set eval_samples: 0"
        yield fault("data", "data.heldout", data.heldout, expected, remedy)
        return
    known = {_prompt(row.messages) for row in inputs.train.first}
    shared = sum(_prompt(row.messages) in known for row in inputs.heldout.first)
    if shared and data.heldout != DEMO:
        remedy = "take them out of the train rows"
        measured = f"{shared} of the first rows"
        yield advice("data", "data.heldout", measured, expected, remedy)


def _same(train: DataSource, heldout: DataSource) -> bool:
    """Another format makes no other rows."""
    if train.hub or heldout.hub:
        return train.place == heldout.place
    first, second = Path(train.place), Path(heldout.place)
    return first.exists() and second.exists() and first.samefile(second)


def _prompt(messages: object) -> str:
    return repr(messages)


def reward_can_be_earned(inputs: Inputs) -> Iterator[Finding]:
    """A known reward is above 0 for some answer to the first rows, written in any usual form."""
    reward = REWARDS.get(inputs.config.data.reward)
    answers = [row.answer for row in inputs.train.first[:_FEW] if isinstance(row, AnsweredRow)]
    if reward is None or not answers or not uses_reward(inputs):
        return
    if not any(reward(form.format(answer), answer) > 0 for answer in answers for form in FORMS):
        expected = f"one that an answer such as {answers[0]!r:.60} can earn"
        measured, remedy = inputs.config.data.reward, "no answer to the first rows would be right"
        yield fault("reward", "data.reward", measured, expected, remedy)


def reward_of_another_data_set(inputs: Inputs) -> Iterator[Finding]:
    """A known data set is judged by its own reward."""
    data = inputs.config.data
    if data.reward not in REWARDS or not uses_reward(inputs):
        return
    train = parse_source(data.train, form=data.format).form
    heldout = parse_source(data.heldout, form=data.format, heldout=True).form
    of = f"that of {data.reward} rows" if data.reward in FORMATS else "answers are judged whole"
    if train and train != data.reward:
        expected = f"{train}, the reward of the train rows"
        yield advice("reward", "data.reward", data.reward, expected, of)
    elif heldout and heldout != data.reward:
        expected = f"rows that {data.reward} judges"
        yield advice("reward", "data.heldout", data.heldout, expected, of)


def roles_are_known(inputs: Inputs) -> Iterator[Finding]:
    """Chat templates know these roles, and a prompt does not end with an answer."""
    for key, rows in (("data.train", inputs.train), ("data.heldout", inputs.heldout)):
        given = {message["role"] for row in rows.first for message in row.messages}
        if given - _ROLES:
            measured, expected = ", ".join(sorted(given - _ROLES)), ", ".join(sorted(_ROLES))
            remedy = "the chat template may refuse such a row"
            yield advice("data", key, measured, f"roles {expected}", remedy)
        elif any(
            row.messages[-1]["role"] == "assistant"
            for row in rows.first
            if isinstance(row, AnsweredRow)
        ):
            expected = "messages up to the question, with the answer in `answer`"
            yield advice("data", key, "a last message of the assistant", expected)


def template_of_agents(inputs: Inputs) -> Iterator[Finding]:
    """An agent's prompts are rendered by the server, with the template arguments of the agent."""
    given = inputs.config.data.chat_template_kwargs
    if given and any(stage.grpo and stage.grpo.agent for _, stage in inputs.stages):
        expected = "{}, or the same `chat_template_kwargs` in the calls of grpo.agent"
        remedy = "an agent's prompts are written by the server"
        yield advice("data", "data.chat_template_kwargs", given, expected, remedy)


def uses_reward(inputs: Inputs) -> bool:
    """Whether anything of the run is judged by data.reward."""
    stages = inputs.config.own_stages.values()
    return any(stage.eval_samples or (stage.grpo and not stage.grpo.agent) for stage in stages)
