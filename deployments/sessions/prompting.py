"""The prompt of a session's call: the engine's own ids for what was generated, rendered ids for what is new.

The recording client beside the engine renders; this file says what it must render and puts the ids together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from deployments.protocols.generation import packed_ids
from deployments.sessions.records import ChatContext, ChatMessage, Plan, RenderedMessage


class SessionRenderer(Protocol):
    """The model's chat template and tokenizer, as the engine's server uses them. Threads may share it."""

    def prompt(self, messages: Sequence[ChatMessage], context: ChatContext) -> list[Sequence[int]]:
        """The ids of each message's part of the rendering of all of them, the last with the generation prompt."""
        ...

    def following(
        self,
        messages: Sequence[ChatMessage],
        after: Sequence[int],
        context: ChatContext,
        calls: Sequence[Mapping[str, Any]] = (),
        calls_before: int = 0,
    ) -> list[Sequence[int]]:
        """The same for messages, at least one, that follow the generated ids `after`, without these.

        The first message begins with the end of the response's turn, as far as `after` does not have it.

        Args:
            calls: those of the response, which messages of role `tool` answer.
            calls_before: how many calls there were before these.
        """
        ...

    def generation_prompt(self, context: ChatContext) -> Sequence[int]:
        """The ids that the template puts after the last message to begin a response."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The prompt of one call, and the parts of it that the record needs."""

    token_ids: Sequence[int]
    """What the engine gets."""
    rendered: tuple[RenderedMessage, ...]
    generation_prompt: Sequence[int]


def prepared_prompt(
    plan: Plan, messages: Sequence[ChatMessage], context: ChatContext, renderer: SessionRenderer
) -> PreparedPrompt:
    """Puts the prompt of a call together. `messages` are all of the call's, those that the plan covers included.

    Raises what the renderer raises.
    """
    new = messages[plan.covered :]
    if plan.after is None:
        ids = renderer.prompt(new, context)
    else:
        *before, calls = (message.get("tool_calls") or () for message in messages[: plan.covered])
        ids = renderer.following(new, plan.response_ids, context, calls, sum(map(len, before)))
    token_ids = packed_ids(chain(plan.token_ids, *ids))
    ending = packed_ids(renderer.generation_prompt(context))
    last = packed_ids(ids[-1])
    # The generation prompt is recorded apart, because the same messages may go on with another message.
    if len(ending) <= len(last) and last[len(last) - len(ending) :] == ending:
        last = last[: len(last) - len(ending)]
    else:
        ending = packed_ids(())
    rendered = (RenderedMessage(message, packed_ids(one)) for message, one in zip(new, [*ids[:-1], last], strict=True))
    return PreparedPrompt(token_ids, tuple(rendered), ending)
