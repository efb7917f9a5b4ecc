"""The contract of `/rollouts/{rollout_id}`: the record of a rollout that has ended. Times are in seconds.

Moments (`..._at`) are in seconds since 1970.
"""

from pydantic import JsonValue

from rollout_client.contract.base import Lenient
from rollout_client.contract.mismatch import RolloutMismatch
from rollout_client.contract.rollouts import SampleResult, SampleStatus


class RecordedGeneration(Lenient):
    """One generation: where and how tokens `[start, end)` of the message at index `message` were made."""

    message: int
    """Index of the message in `message_log`."""
    start: int
    """Index of the first token within the message: above 0 where an interrupted generation was continued."""
    end: int
    """Index after the last token."""
    replica: str
    """Id of the generator replica; empty if it is not known."""
    cached_tokens: int = 0
    """How many tokens of its prompt the engine found in its prefix cache."""
    batch_size: int = 0
    """Generations that ran or waited in the engine when it ended, with this one; 0 if it is not known."""
    waited_s: float = 0.0
    """How long it waited for its turn."""
    took_s: float = 0.0
    """How long it took from its turn to its end."""
    began_at: float | None = None
    """When it began to wait; null if it is not known."""


class RecordedStep(Lenient):
    """A step of the environment."""

    turn: int
    """Number of the turn that it judged: of the generated messages of `message_log`, from 0."""
    began_at: float
    """When it began."""
    took_s: float
    """How long it took."""


class RecordedRetry(Lenient):
    """A call that was made again, or a whole rollout that was played anew."""

    at: float
    """When the call had failed."""
    kind: str
    """The boundary that broke, as `kind` of an `error`."""
    message: str
    """The failure, as a sentence."""


class RecordedState(Lenient):
    """The environment's state of a rollout from one turn on, until that of a later turn."""

    turn: int
    """Number of the first turn that was generated in it."""
    extra_env_info: dict[str, JsonValue]
    """The state for the step of this turn."""
    stop_strings: list[str] = []  # noqa: RUF012 - pydantic copies it
    """Those of its generation."""


class RolloutRecord(Lenient):
    """The answer of `GET /rollouts/{rollout_id}`."""

    rollout: SampleResult
    """The rollout, as its request returned it."""
    request_id: str
    """The request that played it."""
    group_id: str
    """The service's own name of its group."""
    policy: str | None = None
    """The named policy that played; null for the one without a name."""
    priority: str | None = None
    """The `priority` of its request; `other` for one that is a number."""
    began_at: float | None = None
    """When it began; null if it ended before."""
    ended_at: float
    """When it ended."""
    generations: list[RecordedGeneration] = []  # noqa: RUF012 - pydantic copies it
    """Its generations, in order; none of an agent's."""
    steps: list[RecordedStep] = []  # noqa: RUF012 - pydantic copies it
    """The steps of its environment, in order."""
    retries: list[RecordedRetry] = []  # noqa: RUF012 - pydantic copies it
    """Its last retries, in order, at most 64; also those that cost none of the request's `retries`."""
    states: list[RecordedState] = []  # noqa: RUF012 - pydantic copies it
    """The environment's states, in order, from the first turn that was played in this request on; a turn without one
    left it as it was."""
    restarts: int = 0
    """How often it was played anew from its prompt."""
    retries_used: int = 0
    """How many of the request's `retries` it used."""
    mismatch: RolloutMismatch | None = None
    """The numbers that a trainer has reported last."""


class RecordedRollout(Lenient):
    """A line of `GET /rollouts`."""

    rollout_id: str
    """The service's name of the rollout."""
    request_id: str
    """The request that played it."""
    task_name: str
    """The environment that played it."""
    status: SampleStatus
    """How it ended."""
    total_reward: float | None
    """Sum of its rewards; null for a failed rollout."""
    ended_at: float
    """When it ended."""
    mean_ratio: float | None = None
    """The mean ratio between a trainer's probabilities and the sampled ones, if a trainer has reported."""


class RecordedRollouts(Lenient):
    """The answer of `GET /rollouts`."""

    rollouts: list[RecordedRollout]
    """The newest first."""
