"""A part of the contract of `POST /rollout`: what an agent has said beside the conversation of its rollout."""

from rollout_client.contract.base import Lenient
from rollout_client.contract.messages import Message


class Branch(Lenient):
    """A further conversation of a rollout that an agent has played: of a subagent, or one that it has left."""

    message_log: list[Message]
    """Prompt and responses, with their tokens."""
    shared_messages: list[int] = []  # noqa: RUF012 - pydantic copies it
    """Indexes in `message_log` of generated messages that the rollout's own log, or an earlier branch, has too. A loss
    that must count each token once leaves them out."""
