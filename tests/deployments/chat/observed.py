"""An observation of one message."""

from collections.abc import Sequence

from deployments.protocols.chat import ChatOptions, ChatTokenizer, TokenizedObservation
from rollout_env import ChatMessage


def observed(
    tokenizer: ChatTokenizer, message: ChatMessage, after: Sequence[int], options: ChatOptions, room: int
) -> TokenizedObservation:
    [only] = tokenizer.observations([message], after, options, room)
    return only
