"""The contract of `/rollouts/{rollout_id}`: the record of a rollout that has ended. Times are in seconds."""

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
    node: str = ""
    """Id of its node in the cluster; empty if it is not known."""
    cached_tokens: int = 0
    """How many tokens of its prompt the engine found in its prefix cache."""
    batch_size: int = 0
    """Generations that ran or waited in the engine when it ended, with this one; 0 if it is not known."""
    waited_s: float = 0.0
    """How long it waited for its turn."""
    took_s: float = 0.0
    """How long it took from its turn to its end."""


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
    ended_at: float
    """When it ended, in seconds since 1970."""
    generations: list[RecordedGeneration] = []  # noqa: RUF012 - pydantic copies it
    """Its generations, in order; none of an agent's."""
    steps_s: list[float] = []  # noqa: RUF012 - pydantic copies it
    """How long each step of the environment took, in order."""
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
    """When it ended, in seconds since 1970."""
    mean_ratio: float | None = None
    """The mean ratio between a trainer's probabilities and the sampled ones, if a trainer has reported."""


class RecordedRollouts(Lenient):
    """The answer of `GET /rollouts`."""

    rollouts: list[RecordedRollout]
    """The newest first."""
