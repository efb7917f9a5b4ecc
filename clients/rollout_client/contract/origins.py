"""The origins of rollouts and of their tokens: forks, generations, and the numbers to make them again."""

from typing import Annotated

from pydantic import Field

from rollout_client.contract.base import Lenient, Strict


class Fork(Strict):
    """The rollout that a sample goes on from, and where."""

    rollout: Annotated[str, Field(min_length=1, max_length=1024)]
    """Its `rollout_id`."""
    turn: Annotated[int, Field(ge=0)] | None = None
    """Number of its first turn that is played anew; 0 is its first one. The turns before it stay, with what the
    environment has answered, and the environment's state is that of then."""
    token: Annotated[int, Field(ge=1)] | None = None
    """In place of `turn`: how many of its first tokens stay. Within a generated message, that message is gone on with,
    from before what could begin a stop string; at its end, the environment judges it again."""


class GenerationSpan(Lenient):
    """Tokens `[start, end)` of the message at index `message` of the log, which one generation made."""

    message: int
    """Index of the message in `message_log`."""
    start: int
    """Index of the first token within the message: above 0 where an interrupted generation was continued."""
    end: int
    """Index after the last token."""


class GenerationOrigin(GenerationSpan):
    """Where these tokens were generated."""

    replica: str = ""
    """Id of the generator replica; empty if it is not known."""
    stop_strings: list[str] | None = None
    """Its stop strings, if they are not those of the generation before; of the first, if it had any."""


class ReplayRecord(Lenient):
    """Numbers by which the service can generate the tokens of a rollout again (`POST /v1/replay`).

    Beside them it needs the `message_log`, with its `weight_versions`. Each generation samples with a seed of its own,
    derived from `seed`, its turn and the tokens that the turn had (`service/rollouts/episode_records.py`).
    """

    service_version: str = ""
    """Version of the service."""
    engine: str = ""
    """Hash of the engine's version and of those settings that may change its numbers."""
    temperature: float = 1.0
    """As sampled; 0 was greedy."""
    top_p: float = 1.0
    """As sampled."""
    top_k: int = 0
    """As sampled; 0 kept all tokens."""
    min_p: float = 0.0
    """As sampled."""
    ignore_eos: bool = False
    """As sampled."""
    seed: int | None = None
    """The rollout's own seed; null if the request had none: then only a greedy rollout can be generated again."""
    max_seq_len: int
    """Bound of the whole log, in tokens."""
    max_new_tokens: int | None = None
    """Bound of each message that was generated, in tokens; null if only `max_seq_len` bounded it."""
    generations: list[GenerationOrigin] = []  # noqa: RUF012 - pydantic copies it
    """The generations of this request, in order; those of a posted log are not known."""


class ForkPoint(Lenient):
    """Where a rollout left its parent."""

    turn: int
    """Number of its first turn of which it generated a token itself: the turns before it are the parent's."""
    token: int
    """How many of its first tokens are the parent's."""
