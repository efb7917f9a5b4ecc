"""What an agent remembers, and what it does with it: continues, retries, edits, compacts, forgets. No I/O."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tests.endurance.session_laws.forms import Message

CONTINUE, RETRY, EDIT, COMPACT, FORGET, SUBAGENT = "continue", "retry", "edit", "compact", "forget", "subagent"
ACTIONS = [CONTINUE, CONTINUE, CONTINUE, RETRY, EDIT, COMPACT, FORGET, SUBAGENT]
Context = TypeVar("Context")
Choose = Callable[[Sequence[Any]], Any]
"""Draws one of several."""


@dataclass
class Conversation(Generic[Context]):
    """Messages, and of each where it comes from."""

    context: Context
    """What it is rendered with beside its messages, such as tools."""
    messages: list[Message] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    """Equal for two messages only if they say the same."""

    def with_new(self, *messages: Message) -> "Conversation[Context]":
        texts = [f"{message['role']}: {message['content']}" for message in messages]
        return Conversation(self.context, [*self.messages, *messages], [*self.origins, *texts])

    def with_response(self, message: Message, origin: str) -> "Conversation[Context]":
        return Conversation(self.context, [*self.messages, message], [*self.origins, origin])

    def of(self, places: Iterable[int]) -> "Conversation[Context]":
        """Only the messages at these places."""
        chosen = list(places)
        kept = [self.messages[place] for place in chosen], [self.origins[place] for place in chosen]
        return Conversation(self.context, *kept)


@dataclass
class Moves(Generic[Context]):
    """Draws what an agent does next.

    Args:
        new: makes a new message of a role. No two of them have the same text.
        contexts: from which one is drawn for each subagent.
        later_roles: of messages that follow a response.
    """

    choose: Choose
    new: Callable[[str], Message]
    contexts: Sequence[Context]
    later_roles: Sequence[str] = ("user",)

    def next(self, action: str, before: Conversation[Context]) -> Conversation[Context]:
        """Args: `before` ends with a response, unless the action is `SUBAGENT`."""
        count = len(before.messages)
        if action == CONTINUE:
            role = self.choose(self.later_roles)
            return before.with_new(*map(self.new, self.choose([[role], [role, "user"]])))
        if action == RETRY:
            answers = [place for place, message in enumerate(before.messages) if message["role"] == "assistant"]
            return before.of(range(answers[-1]))
        if action == EDIT:
            place = self.choose(range(count))
            edited = {**before.messages[place], "content": self.new("user")["content"]}
            return before.of(range(place)).with_new(edited).with_new(self.new("user"))
        if action == COMPACT:
            kept = self.choose(range(count))
            summary = before.of([0]).with_new(self.new("user"))
            rest = before.of(range(count - kept, count))
            joined = Conversation(before.context, summary.messages + rest.messages, summary.origins + rest.origins)
            return joined.with_new(self.new("user"))
        if action == FORGET:
            dropped = self.choose(range(count))
            return before.of(place for place in range(count) if place != dropped).with_new(self.new("user"))
        begun: Conversation[Context] = Conversation(self.choose(self.contexts))
        return begun.with_new(*map(self.new, self.choose([["system", "user"], ["user"]])))
