"""The protocols that agents may speak to the recording proxy: one file and one row each."""

from shakedown.rollout.protocols import completions
from shakedown.rollout.protocols.base import Protocol
from shakedown.rollout.protocols.chat import ChatReply
from shakedown.rollout.protocols.chat import to_chat as chat_to_chat
from shakedown.rollout.protocols.messages import MessagesReply
from shakedown.rollout.protocols.messages import to_chat as messages_to_chat
from shakedown.rollout.protocols.responses import ResponsesReply
from shakedown.rollout.protocols.responses import to_chat as responses_to_chat

# By the path below the base URL, without `/v1`.
PROTOCOLS: dict[str, Protocol] = {
    "chat/completions": Protocol(chat_to_chat, ChatReply),
    "responses": Protocol(responses_to_chat, ResponsesReply),
    "messages": Protocol(messages_to_chat, MessagesReply),
    "completions": Protocol(
        completions.to_chat,
        completions.CompletionsReply,
        completions.PATH,
        completions.to_engine,
        completions.from_engine,
    ),
}
