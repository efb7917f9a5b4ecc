"""Whether the record of a session is what its agent was answered. No I/O."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rollout_client.contract.messages import Message

Ids = tuple[int, ...]


class Answered(NamedTuple):
    """What an agent has written down."""

    responses: list[tuple[Ids, Ids]]
    """The prompt and the response of each call that was answered."""
    broken: int
    """Calls that broke, the one included that was under way when the agent ended."""


def answered(text: str) -> Answered:
    """Reads the file of an agent, whose last line may be cut off."""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    responses = [(tuple(line["prompt"]), tuple(line["response"])) for line in lines if line is not None]
    return Answered(responses, len(lines) - len(responses) + 1)


def responses_in(log: Sequence[Message], shared: Sequence[int] = ()) -> Iterator[tuple[Ids, Ids]]:
    """The ids before each generated message of a branch, and its own; without those that other branches have too."""
    ids: list[int] = []
    for place, message in enumerate(log):
        if message.generation_logprobs is not None and place not in shared:
            yield tuple(ids), tuple(message.token_ids)
        ids += message.token_ids


def problems_of(session_id: str, said: Answered, recorded: Sequence[tuple[Ids, Ids]]) -> list[str]:
    """Args: `recorded` are the prompts and responses of all branches, each once."""
    missing = Counter(said.responses) - Counter(recorded)
    further = Counter(recorded) - Counter(said.responses)
    problems = [f"{session_id}: {missing.total()} answers are not recorded, or differently"] if missing else []
    if further.total() > said.broken:
        problems.append(
            f"{session_id}: {further.total()} responses are recorded beside those that were answered, and "
            f"{said.broken} calls broke"
        )
    return problems
