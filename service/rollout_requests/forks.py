"""Forks: a sample that names a kept rollout becomes one with the first part of that rollout's log as its `message_log`.

From there on it is played as if its caller had posted that log, with the environment's state of that turn. `_forked` is
pure; `take_forks` reads the records.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from deployments.protocols.chat import ChatTokenizer
from deployments.rollout_records.book import NO_RECORD, records_not_configured
from rollout_client.contract.base import FieldProblem, set_fields
from rollout_client.contract.messages import GivenMessage, Message
from rollout_client.contract.origins import Fork
from rollout_client.contract.records import RolloutRecord
from rollout_client.contract.rollouts import RolloutRequest, SampleInput, SampleResult
from rollout_client.results import logs_of, turns_of
from service.access.keys import Caller
from service.problems import MOST_PROBLEMS, invalid_request
from service.rollouts.messages import first_tokens_of
from service.rollouts.progress import ProgressLog

if TYPE_CHECKING:
    from service.rollout_records.recorder import RolloutRecorder

READ_AT_ONCE = 32
"""Records that are read from their store together."""
Kept = tuple[RolloutRecord, int]


async def take_forks(
    request: RolloutRequest,
    records: "RolloutRecorder | None",
    caller: Caller,
    tokenizer: ChatTokenizer,
    most_bytes: int,
    hold: Callable[[int], None],
    progress: ProgressLog | None = None,
) -> int:
    """Puts the logs of the request's forks into their samples. Returns how many bytes these took.

    Args:
        most_bytes: bound of these bytes.
        hold: called with the bytes so far, before more are read.
        progress: the log of a request that another process may continue, which keeps the samples with their logs.

    Raises:
        RequestProblem: 422, a rollout is not known or cannot be forked there, or `hold` raises it.
        RolloutRecordsNotConfigured: no records are kept.
        RolloutRecordsLost: their store does not answer.
    """
    before = {} if progress is None else progress.started
    for place in before.keys() & range(len(request.samples)):
        if before[place].fork is not None:
            request.samples[place] = before[place]
    forks = {
        place: sample.fork
        for place, sample in enumerate(request.samples)
        if sample.fork is not None and sample.message_log is None
    }
    if not forks:
        return 0
    if records is None:
        raise records_not_configured(f"samples[{min(forks)}].fork")
    kept: dict[str, Kept | None] = {}
    size = 0
    names = sorted({fork.rollout for fork in forks.values()})
    for begin in range(0, len(names), READ_AT_ONCE):
        rollout_ids = names[begin : begin + READ_AT_ONCE]
        read = await asyncio.gather(*(records.kept(rollout_id, caller) for rollout_id in rollout_ids))
        kept |= zip(rollout_ids, read, strict=True)
        size = sum(found[1] for fork in forks.values() if (found := kept.get(fork.rollout)) is not None)
        if size > most_bytes:
            message = f"the logs of the forks take more than {most_bytes} bytes; fork fewer in one request"
            raise invalid_request(FieldProblem(field="samples", message=message))
        hold(size)
    samples = await asyncio.to_thread(_forked_samples, request.samples, forks, kept, tokenizer)
    for place, sample in samples.items():
        request.samples[place] = sample
    if progress is not None:
        await progress.note_started(samples)
    return size


def _forked_samples(
    samples: Sequence[SampleInput], forks: dict[int, Fork], kept: dict[str, Kept | None], tokenizer: ChatTokenizer
) -> dict[int, SampleInput]:
    """The samples with their logs, by place. Raises `RequestProblem`."""
    taken: dict[int, SampleInput] = {}
    problems: list[FieldProblem] = []
    for place, fork in forks.items():
        try:
            found = kept[fork.rollout]
            taken[place] = _forked(samples[place], fork, None if found is None else found[0], tokenizer)
        except _CannotFork as refused:
            problems.append(FieldProblem(field=f"samples[{place}].fork", message=str(refused), value=fork.rollout))
    if problems:
        raise invalid_request(*problems[:MOST_PROBLEMS])
    return taken


class _CannotFork(Exception):
    """The rollout cannot be forked there."""


def _forked(sample: SampleInput, fork: Fork, record: RolloutRecord | None, tokenizer: ChatTokenizer) -> SampleInput:
    """The sample with the log and the state of the rollout at the point of the fork. Raises `_CannotFork`."""
    if record is None:
        raise _CannotFork(f"{NO_RECORD}; post its message_log in its place")
    rollout = record.rollout
    if rollout.task_name != sample.task_name:
        message = f"it is a rollout of task {rollout.task_name!r}, and the sample's task is {sample.task_name!r}"
        raise _CannotFork(f"{message}; send its task_name")
    if not record.states:
        raise _CannotFork("a program has played it, which cannot go on from a turn; play its sample again")
    turn, log = (
        _log_at_turn(record, fork.turn) if fork.turn is not None else _log_at_token(record, fork.token, tokenizer)
    )
    state = next((state for state in reversed(record.states) if state.turn <= turn), None)
    if state is None:
        message = (
            f"the states of its environment are known from turn {record.states[0].turn} on, where its own log was "
            f"posted; fork there or later, or fork {rollout.parent or 'the rollout that played the turns before'}"
        )
        raise _CannotFork(message)
    of_rollout = {
        "extra_env_info": state.extra_env_info,
        "stop_strings": state.stop_strings,
        "observation_format": rollout.observation_format,
        "tools": rollout.tools,
        "chat_template_kwargs": rollout.chat_template_kwargs,
        "branches": rollout.branches[: [*_places_of_turns(rollout), (None, 0)][turn][0]],
    }
    update = {name: value for name, value in of_rollout.items() if name not in sample.model_fields_set}
    given = [GivenMessage.model_construct(**set_fields(message)) for message in log]
    return sample.model_copy(update={**update, "message_log": given, "fork": Fork(rollout=fork.rollout)})


def _log_at_turn(record: RolloutRecord, turn: int) -> tuple[int, list[Message]]:
    """The turn, and the messages before it. Raises `_CannotFork`."""
    log, generated = record.rollout.message_log, _places_of_turns(record.rollout)
    if turn < len(generated):
        number, place = generated[turn]
        return turn, [*logs_of(record.rollout)[number][:place]]
    goes_on = not record.rollout.terminated and log[-1].generation_logprobs is None
    if turn > len(generated) or not goes_on:
        last = len(generated) if goes_on else len(generated) - 1
        message = f"the last turn that it can be forked at is {last}"
        raise _CannotFork(f"{message}: the environment ended it there" if record.rollout.terminated else message)
    return turn, log


def _log_at_token(record: RolloutRecord, token: int | None, tokenizer: ChatTokenizer) -> tuple[int, list[Message]]:
    """The turn of which token `token` would be, and the messages with all tokens before it. Raises `_CannotFork`."""
    assert token is not None
    log = record.rollout.message_log
    ends = list(accumulate(len(message.token_ids) for message in log))
    place = next((place for place, end in enumerate(ends) if token <= end), None)
    if place is None:
        raise _CannotFork(f"it has {ends[-1] if ends else 0} tokens; send at most as many")
    generated = turns_of(logs_of(record.rollout))[-1]
    following = (turn for begin, turn in generated.items() if begin >= place)
    turn = next(following, len(_places_of_turns(record.rollout)))
    if place not in generated:
        if token == ends[place] and (place + 1 in generated or place + 1 == len(log)):
            return _log_at_turn(record, turn)
        message = f"it is within what was said before turn {turn}, where nothing is generated; fork at that turn"
        raise _CannotFork(message)
    response = log[place]
    kept = token - ends[place] + len(response.token_ids)
    if kept < len(response.token_ids):
        return turn, [*log[:place], first_tokens_of(response, kept, tokenizer)]
    # Its reward was of the step that is made anew.
    fields = {name: value for name, value in set_fields(response).items() if name != "reward"}
    return turn, [*log[:place], Message.model_construct(**fields)]


def _places_of_turns(rollout: SampleResult) -> list[tuple[int, int]]:
    """For each turn the number of the log in which it was generated, and its place there."""
    turns = [*enumerate(turns_of(logs_of(rollout)))]
    first = {turn: (number, place) for number, of_log in turns[::-1] for place, turn in of_log.items()}
    return [first[turn] for turn in range(len(first))]
