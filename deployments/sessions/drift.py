"""The drift report: where a harness sends otherwise than the session has it, and what was done about it. No I/O."""

from collections.abc import Iterable, Iterator, Sequence

from deployments.sessions.message_comparison import shown_text
from deployments.sessions.records import ChatMessage, GeneratedMessage
from rollout_client.session_contract import LONGEST_DRIFT_TEXT, CallDrift, DriftAction, DriftReport, MessageDrift
from rollout_env.records import escaped_half_surrogates

SHOWN_BEFORE = 20
"""Characters before the first difference that a report shows."""


def generated_ids_drift(
    place: int, message: ChatMessage, generated: GeneratedMessage, fields: list[str]
) -> MessageDrift:
    """A generated message in another form, in whose place the engine's own ids are used."""
    return drift_of(place, message, "generated_ids", fields, generated.message)


def new_messages_drift(
    messages: Sequence[ChatMessage], first: int, recorded: ChatMessage | None
) -> Iterator[MessageDrift]:
    """Of the messages from place `first` on, which the session does not have.

    Args:
        recorded: what it has at this place; `None`: nothing, so that no branch starts.
    """
    if recorded is not None:
        yield drift_of(first, messages[first], "new_branch", [], recorded)
    for place in range(first + (recorded is not None), len(messages)):
        if messages[place].get("role") == "assistant":
            yield drift_of(place, messages[place], "rendered_anew", [], None)


def drift_report(session_id: str, calls: Sequence[CallDrift]) -> DriftReport:
    counts: dict[DriftAction, int] = {"generated_ids": 0, "new_branch": 0, "rendered_anew": 0}
    for one in all_messages(calls):
        counts[one.action] += 1
    drifted = [call for call in calls if call.messages]
    return DriftReport(session_id=session_id, calls=len(calls), drift=drifted, counts=counts)


def all_messages(calls: Iterable[CallDrift]) -> Iterator[MessageDrift]:
    return (message for call in calls for message in call.messages)


def drift_of(
    place: int, message: ChatMessage, action: DriftAction, fields: list[str], recorded: ChatMessage | None
) -> MessageDrift:
    # No answer can be written with half of a surrogate pair, which the JSON of a call can spell.
    received = escaped_half_surrogates(shown_text(message))
    there = None if recorded is None else escaped_half_surrogates(shown_text(recorded))
    start = max(first_difference(received, there) - SHOWN_BEFORE, 0) if there is not None else 0
    part = slice(start, start + LONGEST_DRIFT_TEXT)
    return MessageDrift(
        message=place,
        role=str(message.get("role")),
        action=action,
        fields=fields,
        recorded=None if there is None else there[part],
        received=received[part],
    )


def first_difference(text: str, other: str) -> int:
    pairs = zip(text, other, strict=False)
    return next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(text), len(other)))
