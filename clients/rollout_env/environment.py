"""Base classes of environments and of the sessions that they open."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from rollout_env.models import ChatModel, RewardModel
from rollout_env.records import ChatMessage, JsonObject, StartOutcome, StepOutcome
from rollout_env.users import SimulatedUser


class Session(ABC):
    """State that one rollout holds: a socket, a sandbox, a game in memory. `TaskEnvironment.open_session` makes it.

    All its methods may be plain or async, like those of an environment. The steps of one session never overlap.
    """

    @abstractmethod
    def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome | Awaitable[StepOutcome]:
        """Judges the response, which is the last message of `message_log`.

        Arguments and outcome are those of `TaskEnvironment.step`. A step that raises, times out or is aborted ends the
        session, because its progress is unknown.

        Raises:
            TemporaryFailure: the session's state is lost, such as a dropped connection.
            SampleRejected: as in `TaskEnvironment.step`.
        """

    def close(self) -> Awaitable[None] | None:  # noqa: B027 - some sessions are only memory
        """Releases the session's resources. Called once; a step that has timed out may still run in its thread."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The worth of one sample by its task, for `rollout env certify`. The service itself reads none of it."""

    replies: Sequence[str | ChatMessage] | None = None
    """Replies that solve the sample, one a turn; None if the task does not know any."""
    best: float = 1.0
    """The total reward that these replies earn."""
    floor: float = 0.0
    """The most that a rollout earns that does no work."""
    program: Callable[[str], str] | None = None
    """Makes the reply that has a Python program carried out, from its source; None where replies run nothing."""
    reaches: bool = False
    """Whether programs may reach the network."""
    hidden: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of files, and values of variables, that no program of the model may read, by their names."""


LostSession = Literal["restart", "reopen", "fail"]
"""Policy for a rollout whose session is lost, because its replica has ended or a step has timed out.

- `restart`: it restarts from its prompt, which costs one of the request's `retries`.
- `reopen`: `open_session` is given the messages so far and makes a session that stands where the lost one stood.
- `fail`: it fails. The failure is retryable: the sample may be posted again.
"""


class TaskEnvironment(ABC):
    """A task: rewards responses and gives the model its next observation.

    A subclass has `step`, for one response, or `step_batch`, for many; with both, `step_batch` is called. These two,
    `start` and `close` may be plain or async. A plain method runs in a thread of its own, so it may block; several run
    at once.

    An instance keeps no state of a rollout. The state is in `extra_env_info`, and a step returns the next state as
    `metadata`. The reason: one instance steps many rollouts at once, and each step of a rollout may run on another
    replica. A subclass whose rollouts hold what cannot be in `extra_env_info`, such as a socket or a game in memory,
    has `open_session` in place of a step.

    The parameters of the subclass's constructor are the environment's settings: the `arguments` of its entry in the
    service's config, validated by their annotations, as pydantic validates the fields of a model.
    """

    description: ClassVar[str]
    """One sentence about the task, shown by `GET /tasks`."""

    ExtraEnvInfo: ClassVar[type[BaseModel]]
    """The fields of `extra_env_info`. The service validates those of all samples before it generates anything, and
    those of each state before its step. Prefer a validator here to `SampleRejected`, which a step raises too late."""

    tools: Sequence[JsonObject] = ()
    """JSON schemas of functions, in the form that the model's chat template expects, such as `{"type": "function",
    "function": {"name": ..., "parameters": ...}}`. The template gets them for each sample without `tools` of its own.
    Set them on the class or in the constructor."""

    chat_models: Mapping[str, ChatModel] = MappingProxyType({})
    """The models that the environment may ask, by their names under `models` of its entry in the config. The service
    sets them after the constructor; a test sets scripted ones. Ask them in async steps."""

    reward_models: Mapping[str, RewardModel] = MappingProxyType({})
    """The service's reward models that the entry names under `reward_models`."""

    max_concurrent_steps: int | None = None
    """How many steps one replica runs at once; None for all, or 64 if `step` is plain. The others wait in the replica's
    queue, where requests take turns. The time limit of a step begins when it leaves the queue. Set it, on the class or
    in the constructor, if steps share something scarce, such as worker processes or the connections to a database; a
    plain `step` that is not safe in several threads at once needs 1."""

    def use_models(self, chat_models: Mapping[str, ChatModel], reward_models: Mapping[str, RewardModel]) -> None:
        """Hands the models to the environment. An environment that wraps others passes them on.

        Called once, after the constructor, whose parameters are the author's own. A subclass may check here that it has
        the models that it needs: an exception keeps the environment from starting.
        """
        self.chat_models, self.reward_models = chat_models, reward_models

    def use_user(self, user: SimulatedUser) -> None:
        """Hands over the user that `user_simulator` of the entry describes. Without this method no entry has one.

        Called once, after `use_models`. A step asks the user after each response that makes no calls, returns the turn
        as its observation with the turn's `metrics`, and judges the conversation once the user has ended it.
        """
        raise NotImplementedError

    def start(self, message_log: list[ChatMessage], extra_env_info: Any) -> StartOutcome | Awaitable[StartOutcome]:
        """Makes the first observation of a sample and its state, such as the text of a new game. Optional.

        Is called once for each sample of a request, before anything is generated: all rollouts of its group begin with
        the same start. So it must be the same for the same `extra_env_info`; what is random is seeded by a field of it.
        A sample with a `message_log` was started before and is not started again.

        Args:
            message_log: the prompt's messages; empty for a sample without `messages`, which a task with a start allows.
            extra_env_info: as the sample has it, an instance of `ExtraEnvInfo`.

        Raises:
            SampleRejected: as in `step`.
        """
        raise NotImplementedError

    def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome | Awaitable[StepOutcome]:
        """Judges the response, which is the last message of `message_log`.

        If it is async, many steps run at once in one event loop: await what takes long.

        Args:
            message_log: all messages of the rollout so far: `role`, `content`, and where they have them `name` and
                `tool_call_id`; responses also `tool_calls`, `reasoning_content`, `parsed_content` and `parse_error`, if
                the service has parsers for them. The last one, which is judged, has `finish_reason` and `token_count`.
            extra_env_info: the state of this rollout, an instance of `ExtraEnvInfo`.

        Returns:
            an observation whose roles the model's chat template knows, finite rewards, and metadata that is JSON and
            valid for `ExtraEnvInfo`.

        Raises:
            SampleRejected: `extra_env_info` is well-formed but no state of this task. The sample fails with this
                message. Any other exception fails the sample too, as a fault of the environment. The step is not tried
                again in either case.
        """
        raise NotImplementedError

    def step_batch(
        self, message_logs: list[list[ChatMessage]], extra_env_infos: list[Any]
    ) -> list[StepOutcome] | Awaitable[list[StepOutcome]]:
        """Judges many responses: those whose steps are ready at the same moment, at least one.

        If a call for several raises, it is called again for each of them alone: only those fail that raise then.

        Args:
            message_logs: as `step` gets them, one for each response.
            extra_env_infos: their states, in the same order.

        Returns:
            one outcome for each response, in the same order.
        """
        raise NotImplementedError

    def open_session(self, message_log: list[ChatMessage], extra_env_info: Any) -> Session | Awaitable[Session]:
        """Opens the session of one rollout, before its first step. All its steps run in this session, on one replica.

        The session is closed when its rollout has ended, in whatever way, after `session_idle_s` without a step, and
        when the replica ends.

        Args:
            message_log: the messages before the response that is stepped first. They have earlier responses only where
                `lost_session` is "reopen".
            extra_env_info: as in `step`.

        Raises:
            TemporaryFailure: it cannot be opened just now. It is tried again.
            SampleRejected: as in `step`.
        """
        raise NotImplementedError

    def fork_session(self, message_log: list[ChatMessage], extra_env_info: Any) -> Session | Awaitable[Session]:
        """Opens a session that stands where a log with earlier turns ends: of a fork, or one that was posted. Optional.

        The rollout that had those turns has ended, and its session is closed. So what is needed comes from the messages
        or from `extra_env_info`: a session that can be forked returns a copy of its state, or the name of a snapshot of
        its sandbox, as `metadata` of each step. Without this method `open_session` is called where `lost_session` is
        "reopen"; otherwise such rollouts are refused.

        Args:
            message_log: the messages before the response that is stepped first.
            extra_env_info: the state after the steps that these messages have had.

        Raises:
            TemporaryFailure, SampleRejected: as in `open_session`. A snapshot that is gone is a rejected sample.
        """
        raise NotImplementedError

    def reference(self, sample: Mapping[str, Any]) -> Reference | Awaitable[Reference]:  # noqa: ARG002
        """The solution of a sample, and what it is worth. Optional: without it `rollout env certify` knows no solution.

        Args:
            sample: one that `example_samples` made.
        """
        return Reference()

    is_made_of: str | None = None
    """The folder of what it plays, and `made_with` how it plays that: the `source` of its certificate, in place of the
    file of its class. Set both in the constructor."""
    made_with: JsonObject | None = None

    certified_as: ClassVar[str | None] = None
    """Import path of the environment, with the same arguments, that `rollout env certify` plays in place of this one,
    which an agent plays otherwise."""

    lost_session: LostSession = "restart"
    """Policy for lost sessions. This and the next two have no effect without `open_session`."""

    max_sessions: int | None = None
    """How many sessions one replica holds at once; None for any number. The first steps of further rollouts wait until
    one is closed. All rollouts of a request with `schedule: lockstep` hold theirs at once: such a request fails if
    there are fewer."""

    session_idle_s: float = 1800.0
    """Seconds without a step after which a session is closed. Generations between two steps may take long, and wait for
    those of other rollouts: this is for callers that are gone."""

    sample_count: int | None = None
    """How many different samples there are, where `example_samples` begins again after the last one, as with a
    benchmark; None where it makes them without end. An evaluation plays each once. Set it in the constructor."""

    @abstractmethod
    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Makes `count` different samples, equal ones for an equal `seed`.

        Returns:
            samples of a rollout request with `messages` and `extra_env_info`; `task_name` may be missing.
        """

    def close(self) -> Awaitable[None] | None:  # noqa: B027 - most environments hold nothing
        """Releases the instance's resources. Called once, when its replica ends."""


def has_a_start(environment_class: type[TaskEnvironment]) -> bool:
    return environment_class.start is not TaskEnvironment.start


def has_a_user(environment_class: type[TaskEnvironment]) -> bool:
    return environment_class.use_user is not TaskEnvironment.use_user


def steps_in_batches(environment_class: type[TaskEnvironment]) -> bool:
    return environment_class.step_batch is not TaskEnvironment.step_batch


def has_sessions(environment_class: type[TaskEnvironment]) -> bool:
    return environment_class.open_session is not TaskEnvironment.open_session


def forks_sessions(environment: TaskEnvironment) -> bool:
    """Whether it opens sessions that stand at a later turn than the first."""
    can_fork = has_own_fork(environment) or environment.lost_session == "reopen"
    return can_fork and has_sessions(type(environment))


def has_own_fork(environment: TaskEnvironment) -> bool:
    # Asked of the instance: one that wraps another has the method if that has.
    fork = environment.fork_session
    return getattr(fork, "__func__", fork) is not TaskEnvironment.fork_session


def has_a_step(environment_class: type[TaskEnvironment]) -> bool:
    has_another = steps_in_batches(environment_class) or has_sessions(environment_class)
    return has_another or environment_class.step is not TaskEnvironment.step
