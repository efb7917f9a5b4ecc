"""What must hold of the record of a session, given what its calls were answered. No I/O.

- The recorded ids of each response are those that were answered, in order, and each response is recorded once.
- The prompt of each call begins with the engine's own ids of what it continues, and is the fresh rendering of its
  messages wherever that begins with them too.
- The recorded log-probabilities are those that were answered, and those of other routes for the same tokens.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import pytest

from rollout_client.contract.messages import Message
from rollout_client.contract.sessions import SessionInfo, SessionSample
from tests.endurance.session_laws.random_agent import Call, Choice, PlayedSession

ANSWERED_TOLERANCE = 1e-6
"""Both are the engine's own; records keep them as 32-bit numbers."""


def record_problems(session: PlayedSession, samples: Sequence[SessionSample], info: SessionInfo) -> list[str]:
    """A sentence for each thing that does not hold."""
    choices = {choice.id: (call, choice) for call in session.calls for choice in call.choices}
    left = set(chain.from_iterable(call.left for call in session.calls))
    recorded = recorded_responses(samples)
    of_left = [(prompt, list(message.token_ids)) for name, prompt, message in recorded if name in left]
    problems = list(prompt_problems(session.calls, of_left))
    times = Counter(name for name, _, _ in recorded)
    if repeated := [name for name, count in times.items() if count > 1]:
        problems.append(f"{repeated} are recorded more than once")
    if missing := choices.keys() - times.keys():
        problems.append(f"{missing} are not recorded")
    if unknown := times.keys() - choices.keys() - left:
        problems.append(f"{unknown} are recorded, and nobody was answered them")
    for name, prompt, message in recorded:
        if name in choices:
            problems += response_problems(*choices[name], prompt, message)
    generated = sum(len(message.token_ids) for _, _, message in recorded)
    if info.generated_tokens != generated:
        problems.append(f"{info.generated_tokens} tokens were generated, and the samples have {generated}")
    return problems


def recorded_responses(samples: Sequence[SessionSample]) -> list[tuple[str, list[int], Message]]:
    """Each generated message in the first sample that has it, with its id and the ids before it."""
    found = []
    for sample in samples:
        for place, name, prompt, message in responses_of(sample):
            if place not in sample.shared_messages:
                found.append((name, prompt, message))
    return found


def responses_of(sample: SessionSample) -> Iterator[tuple[int, str, list[int], Message]]:
    """The generated messages of a branch: place in its log, id, ids before it."""
    ids: list[int] = []
    names = iter(sample.generation_ids)
    for place, message in enumerate(sample.message_log):
        if message.generation_logprobs is not None:
            yield place, next(names), list(ids), message
        ids += message.token_ids


def response_problems(call: Call, choice: Choice, prompt: list[int], recorded: Message) -> Iterator[str]:
    if prompt != call.prompt:
        yield f"{choice.id}: its recorded prompt is not the engine's: {prompt} for {call.prompt}"
    if list(recorded.token_ids) != choice.token_ids:
        yield f"{choice.id}: {list(recorded.token_ids)} are recorded for {choice.token_ids}"
    logprobs = recorded.generation_logprobs or ()
    if len(logprobs) != len(choice.token_ids):
        yield f"{choice.id}: {len(logprobs)} log-probabilities for {len(choice.token_ids)} tokens"
    answered = choice.logprobs
    if answered is not None and logprobs != pytest.approx(answered, rel=ANSWERED_TOLERANCE, abs=ANSWERED_TOLERANCE):
        yield f"{choice.id}: its recorded log-probabilities are not those of the answer: {logprobs} for {answered}"
    if recorded.finish_reason != {"tool_calls": "stop"}.get(choice.finish_reason, choice.finish_reason):
        yield f"{choice.id}: it ended with {choice.finish_reason}, and {recorded.finish_reason} is recorded"


def prompt_problems(calls: Sequence[Call], of_left: Sequence[tuple[list[int], list[int]]]) -> Iterator[str]:
    """Args: `of_left` are the prompt and the ids of each recorded response to a call that was left.

    Nobody knows what its caller had seen: it may say the same as one that was answered, and is then continued, too.
    """
    said = responses_by_id(calls)
    for call in calls:
        if not call.choices:
            continue
        name = call.choices[0].id
        before = [said[each] for each in call.continues if begins_with(call.prompt, said[each].ids)]
        prompts = [said[each].ids[: len(said[each].ids) - len(said[each].choice.token_ids)] for each in call.continues]
        if not before and any(prompt in prompts and begins_with(call.prompt, prompt + ids) for prompt, ids in of_left):
            continue
        if call.continues and not before:
            yield f"{name}: its prompt does not begin with the ids of {call.continues}, which it continues"
            continue
        must_be_fresh = not before or is_stable(call, max(before, key=lambda one: len(one.ids)))
        if must_be_fresh and call.prompt != call.fresh:
            yield f"{name}: its prompt {call.prompt} is not the fresh rendering {call.fresh}"


class Response(NamedTuple):
    ids: list[int]
    """With those of its prompt."""
    choice: Choice


def responses_by_id(calls: Sequence[Call]) -> dict[str, Response]:
    return {choice.id: Response([*call.prompt, *choice.token_ids], choice) for call in calls for choice in call.choices}


def is_stable(call: Call, continued: Response) -> bool:
    """Whether a fresh rendering has the ids of the response that the call continues."""
    return begins_with(call.fresh, continued.ids) and not continued.choice.is_cut_thought


def stable_calls(calls: Sequence[Call]) -> int:
    """How many calls continue a response that is rendered as it was generated."""
    said = responses_by_id(calls)
    return sum(any(is_stable(call, said[each]) for each in call.continues) for call in calls)


def begins_with(ids: Sequence[int], beginning: Sequence[int]) -> bool:
    return list(ids[: len(beginning)]) == list(beginning)
