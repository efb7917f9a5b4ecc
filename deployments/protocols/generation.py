"""The ports of a rollout, `Generator`, `Engine` and `Environment`, and the records of generations.

The rollout loop calls `Generator` and `Environment` and knows nothing else of the other deployments. `RemoteGenerator`
and `RemoteEnvironment` (`service/remote`) implement them over Serve handles. A generator replica calls `Engine`, which
`VLLMEngine` implements. A replica describes itself by `ReplicaLoad` and `GeneratorDescription`.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal, Protocol

from deployments.failures import GenerationRejected, RolloutFailure
from deployments.protocols.environments import RefusedField, StepRequest, TaskDescription
from deployments.protocols.images import ImageSpan, ImageTokens
from deployments.protocols.replicas import GeneratorDescription, ReplicaLoad
from rollout_client.contract.messages import PackedNumbers
from rollout_env import StepOutcome
from rollout_env.certify import PanelSettings


def packed_ids(token_ids: Iterable[int]) -> "array[int]":
    """Token ids as int32: 4 bytes each where a list takes 36, and nine times faster to pickle and unpickle."""
    return array("i", token_ids)


def packed_logprobs(logprobs: Iterable[float]) -> "array[float]":
    """Log-probabilities as float32, the precision in which the engine computes them."""
    return array("f", logprobs)


def derived_seed(seed: int, *path: int) -> int:
    """A seed in [0, 2^63) for the place `path` under `seed`.

    The same place always gets the same seed; the seeds of different places are unrelated.
    """
    return int.from_bytes(blake2b(repr((seed, *path)).encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are sampled. `temperature` 0 is greedy; `top_k` 0 keeps all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class IncludedColumns:
    """Further numbers of each token that a generation returns beside its log-probability."""

    top_logprobs: int = 0
    """So many of the most likely tokens, with their log-probabilities."""
    sampling_mask: bool = False
    entropy: bool = False
    routed_experts: bool = False


NO_COLUMNS = IncludedColumns()


def included_columns(include: Sequence[str]) -> IncludedColumns:
    """The names of `RolloutRequest.include` as an engine gets them."""
    numbers = dict(name.partition(":")[::2] for name in include)
    return IncludedColumns(
        top_logprobs=int(numbers.get("top_logprobs", 0)),
        sampling_mask="sampling_mask" in numbers,
        entropy="entropy" in numbers,
        routed_experts="routed_experts" in numbers,
    )


TIED_TOKENS = 32
"""So many more than `top_k` of the likeliest tokens are looked at for a sampling mask. Engines keep all tokens that are
as likely as the last one of `top_k`: in bfloat16 often several."""


@dataclass(frozen=True, slots=True)
class RequestShare:
    """The party as which one request shares the engines with other requests."""

    id: str = ""
    """Unique among all requests."""
    weight: float = 1.0
    """Its share in proportion to those of other requests, or of those of the same key; above 0."""
    key: str | None = None
    """The name of its caller's key: the requests of one name share the engines with those of others as one party."""
    key_weight: float = 1.0
    """The share of that party in proportion to other ones; above 0."""


UNNAMED_REQUEST = RequestShare()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation: the token ids of all messages so far in, at most `max_new_tokens` (>= 1) token ids out."""

    generation_id: str
    """Unique among all generations that run; a retry has the id of the generation that it repeats."""
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    stop_strings: tuple[str, ...]
    sampling: SamplingOptions
    min_weight_version: int = 0
    """A replica whose weights are older refuses the request."""
    weight_version: int | None = None
    """A replica whose weights are of another version refuses the request; `None` for any version."""
    max_staleness: int | None = None
    """A replica whose weights are more versions ahead of `oldest_version` refuses the request; `None` for any."""
    oldest_version: int | None = None
    """That of the tokens that the prompt's rollout has so far; `None` if it has none. Only with `max_staleness`."""
    rollout_id: str = ""
    """The rollout of which this is one turn. Each turn's prompt begins with the prompt of the turn before."""
    group: str = ""
    """The group of the rollout. All rollouts of one group begin with the same prompt."""
    request_id: str = ""
    """The request of the rollout, for logs."""
    turn: int = 0
    """How many turns of the rollout were played before this one."""
    share: RequestShare = UNNAMED_REQUEST
    """Is the same object in all generations of a request."""
    policy: str | None = None
    """The named policy whose adapter generates, and whose versions are meant above; `None` for the one without a
    name."""
    virtual_time: int = 0
    """An engine that cannot run all its generations begins those with the lowest first. The ingress's scheduler sets it
    (`service/scheduling/scheduler.py`)."""
    traceparent: str = ""
    """The span of the generation, as the header of the W3C; empty if it is not traced."""
    include: IncludedColumns = NO_COLUMNS
    """Is the same object in all generations of a request."""
    images: tuple[ImageSpan, ...] = ()
    """Where the prompt has tokens of images, in order."""
    experts_from: int = 0
    """The first token of the prompt whose routed experts are not known; with `include.routed_experts` alone."""
    replica: str = ""
    """The only replica that may generate; empty: whichever the scheduler chooses."""

    @property
    def log_fields(self) -> dict[str, str]:
        """Further fields of a log line about it."""
        return {"request_id": self.request_id, "rollout_id": self.rollout_id, "generation_id": self.generation_id}


@dataclass(frozen=True, slots=True)
class ScoringRequest(GenerationRequest):
    """Asks for the log-probabilities of the tokens of its prompt, at temperature 1. Nothing is generated.

    The result is a `ScoredPrompt`, or a `Generation` with `finish_reason` "abort".
    """

    top_k: int = 0
    """So many of the most likely tokens are named for each position."""
    start: int = 0
    """The first position that is asked for, below the length of the prompt."""


def scoring_request(name: str, token_ids: Sequence[int], start: int, **fields: Any) -> ScoringRequest:
    """The request that scores one sequence from `start` on; `name` is unique, and `fields` are further ones."""
    return ScoringRequest(name, token_ids, 1, (), SamplingOptions(), rollout_id=name, group=name, start=start, **fields)


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `[start, end)` of a generation were sampled with the weights of `version`, a label: `7`, `run-b/7`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one generation.

    `logprobs[i]` is the natural log-probability of `token_ids[i]` under the distribution that was sampled from.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length", "abort"]
    """`abort`: it was interrupted. Its tokens so far, maybe none, are whole, and another generation can go on."""
    weight_versions: tuple[WeightSpan, ...] = ()
    failure: RolloutFailure | None = None
    """Why an aborted generation must go on elsewhere or later; `None` if it can go on here at once."""
    columns: Mapping[str, PackedNumbers] = field(default_factory=dict)
    """Columns that were included, by their fields of a `Message`: rows for the tokens of the generation. Rows of
    `routed_experts` are for the tokens from `experts_from` on, those of the prompt among them, to the last but one."""
    replica: str = field(default="", compare=False)
    """Unique id of the replica that its caller had chosen; empty if it knew of none."""
    cached_tokens: int = field(default=0, compare=False)
    """How many tokens of its prompt the engine found in its prefix cache."""
    batch_size: int = field(default=0, compare=False)
    """Generations that ran or waited in the engine when this one ended, with this one. 0: unknown."""
    waited_s: float = field(default=0.0, compare=False)
    """Seconds in which it waited for its turn at the ingress."""
    took_s: float = field(default=0.0, compare=False)
    """Seconds from its turn to its end."""
    began_at: float = field(default=0.0, compare=False)
    """When it began to wait, in seconds since 1970. 0: unknown."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt(Generation):
    """The result of a `ScoringRequest`: a generation without tokens.

    Position 0 has no log-probability. The positions are those from `max(start, 1)` to the end of the prompt.
    """

    prompt_logprobs: Sequence[float] = ()
    """One natural log-probability for each position."""
    top_token_ids: Sequence[int] = ()
    """`top_k` for each position, the most likely first."""
    top_logprobs: Sequence[float] = ()
    """Those of `top_token_ids`."""
    weight_version: str = ""
    """Version of the weights that computed all of them."""


@dataclass(frozen=True, slots=True)
class GenerationResults:
    """One item of the stream that answers a batch of generations; one without results is a heartbeat."""

    results: list[tuple[int, Generation | RolloutFailure]]
    """Each result with its request's place in the call."""
    load: ReplicaLoad
    """The load of the replica after these results."""


class Generator(Protocol):
    """Generates the turns of rollouts. The rollout loop calls it; `RemoteGenerator` implements it."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Runs one generation. Cancelling the call aborts the generation and drops its tokens.

        A generation that was interrupted returns with `finish_reason` "abort": by `interrupt`, by an update of the
        weights, or by the end of its replica.

        Raises:
            GenerationRejected: the engine refuses the request as it is.
            GenerationLost: the engine or its replica broke.
            OtherVersionLoaded: the replica does not have the weights that the request demands.
            Overloaded: the engine's queue is full.
        """

    def is_generating(self, rollout_id: str) -> bool:
        """Whether a generation of this rollout is at a replica, where it may have tokens already."""

    def interrupt(self, rollout_id: str) -> bool:
        """Asks that the generation of this rollout returns soon, with the tokens that it has.

        Returns whether the rollout has a generation under way; without one nothing happens.
        """

    def release(self, rollout_id: str) -> None:
        """Forgets the rollout, which has no further turn. Unknown ids are ignored."""

    async def image_tokens(self, names: Sequence[str]) -> list[ImageTokens]:
        """The tokens that the model has for each of these images of the store.

        Raises:
            GenerationRejected: the model takes no images, refuses one of them, or one is not kept any more.
            GenerationLost: no replica answers.
            ImagesLost: the image store does not answer.
        """
        raise takes_no_images(names)

    async def describe(self) -> GeneratorDescription:
        """Raises `GenerationLost` if no replica answers."""

    def replicas(self) -> Sequence[str]:
        """Ids of the replicas that take calls, as far as they are known."""
        return ()

    async def answer(self, replica: str) -> None:  # noqa: ARG002 - without replicas there is one to ask
        """Returns when this replica has answered that it generates. Raises `GenerationLost` if it does not."""
        await self.describe()


def takes_no_images(names: Sequence[str]) -> GenerationRejected:
    return GenerationRejected(f"The model takes no images, and {len(names)} are shown to it: serve a model that sees.")


class Engine(Protocol):
    """Generates on one replica. A generator replica calls it; `VLLMEngine` implements it."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Runs one generation. Cancelling the call aborts it; raises what `Generator.generate` raises."""

    async def interrupt(self, generation_ids: Iterable[str], failure: RolloutFailure | None = None) -> None:
        """Lets these generations return as "abort" with the tokens that they have. Unknown ids are ignored.

        `failure` becomes the `failure` of what they return.
        """

    async def image_tokens(self, names: Sequence[str]) -> list[ImageTokens]:
        """As `Generator.image_tokens`; raises what it raises."""
        raise takes_no_images(names)

    def describe(self) -> GeneratorDescription: ...

    def load(self) -> ReplicaLoad:
        """Is called for every item of every stream: it costs microseconds."""


class Environment(Protocol):
    """Judges the responses of one task. The rollout loop calls it; `RemoteEnvironment` implements it."""

    async def step(self, request: StepRequest) -> StepOutcome:
        """Judges the last message of the request. Cancelling the call aborts the step.

        Raises:
            TurnTimedOut: the step reached its time limit, which begins when the environment is called.
            EnvironmentRejected: the environment cannot take this sample.
            EnvironmentBroken: the environment's own code raised, or returned an invalid outcome.
            EnvironmentLost: the environment's replica broke during the step.
            SessionLost: the rollout had a session at a replica, and it is gone.
        """

    def release(self, session_id: str) -> None:  # noqa: ARG002 - most environments hold nothing for a rollout
        """Closes the session of a rollout that has ended, or is played anew. Unknown ids are ignored."""
        return

    async def start(self, request: StepRequest) -> StepOutcome:
        """Starts a sample of a task with a start: what it adds to the prompt and to the state, without a reward.

        The `observation` is a list, which may be empty. Raises what `step` raises.
        """
        return await self.step(replace(request, is_start=True))

    async def describe(self) -> TaskDescription:
        """Raises `EnvironmentLost` if no replica answers."""

    async def certify(self, settings: PanelSettings) -> dict[str, Any]:  # noqa: ARG002
        """The task's certificate as a document, empty where there is none to have. Raises `EnvironmentLost`."""
        return {}

    def replicas(self) -> Sequence[str]:
        """Ids of the replicas that take calls, as far as they are known."""
        return ()

    async def answer(self, replica: str) -> None:  # noqa: ARG002 - without replicas there is one to ask
        """Returns when this replica has answered. Raises `EnvironmentLost` if it does not."""
        await self.describe()

    async def known_description(self) -> TaskDescription:
        """The last result of `describe`; asks again where that can have changed. Raises what `describe` raises."""
        return await self.describe()

    async def refused_fields(self, extra_env_infos: Sequence[dict[str, Any]]) -> list[RefusedField]:
        """Checks samples before they are played: the first fields that the environment does not accept, if any.

        Raises `EnvironmentLost` if no replica answers.
        """

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        """`count` different samples of the task, the same ones for the same `seed`. Raises `EnvironmentLost`."""
