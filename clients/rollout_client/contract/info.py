"""The contract of `/info`, `/tasks`, `/readyz`, `/blobs` and `/score`.

Images of `/blobs` are uploaded once, and named in messages by their content, so that equal images have one name. Only
the key that has uploaded an image may name it; where the service asks for no keys, everybody may. Scores are the
log-probabilities of given token ids under the service's weights, of temperature 1, without top-p, top-k and min-p: what
the policy says of each token, given the tokens before it. Log-probabilities are natural logarithms.
"""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from rollout_client.contract.base import Lenient, PolicyDemand, Priority, Strict
from rollout_client.contract.messages import IMAGE_NAME, TokenId
from rollout_client.contract.policy import FollowState
from rollout_client.contract.rollouts import PolicyVersions, SampleError, SampleInput


class TaskInfo(Lenient):
    """One task that the service can play."""

    task_name: str
    """The `task_name` of samples that this environment plays."""
    description: str
    """A description for people."""
    fields: dict[str, JsonValue]
    """JSON schema of the task's `extra_env_info`."""
    tools: list[dict[str, JsonValue]] = []  # noqa: RUF012 - pydantic copies it
    """JSON schemas of the functions that a model may call; the chat template gets them."""
    example: SampleInput
    """A sample that can be posted as it is."""
    splits: dict[str, int] = {}  # noqa: RUF012 - pydantic copies it
    """Rows of each split of the task's data; empty for a task without data, whose environment makes its samples."""
    certificate: str | None = None
    """The hash of the certificate that its config names (`rollout env certify`)."""


class TaskList(Lenient):
    """The answer of `GET /tasks`."""

    tasks: list[TaskInfo]
    """Every task that the service can play."""


class TaskSamples(Lenient):
    """The answer of `GET /tasks/{task_name}/samples`: a page of samples."""

    samples: list[SampleInput]
    """Samples that can be posted as they are; fewer than were asked for if they are large."""
    next_start: int
    """Where the next page begins."""
    sample_count: int | None = None
    """How many different samples the environment has, after which they come again; absent where it makes them without
    end, and for a task with data, whose `splits` are in `GET /tasks`."""


class DegradedPart(Lenient):
    """Something that does not answer. Rollouts are served without it."""

    part: Literal["generator", "environment", "data", "policy", "jobs", "sessions", "images"]
    """Which kind of deployment it belongs to."""
    task_name: str | None = None
    """The task of an environment."""
    replica_id: str | None = None
    """The replica that does not answer; null if none of the deployment does."""
    reason: str
    """The reason, as a sentence."""


class Ready(Lenient):
    """Rollouts can be served."""

    status: Literal["ready"] = "ready"
    """Always `ready`; a service that is not ready answers 503."""
    degraded: list[DegradedPart] = []  # noqa: RUF012 - pydantic copies it
    """Parts that do not answer, by task and replica, or a store. Rollouts of other tasks, and by other replicas,
    are served."""


class ModelInfo(Lenient):
    """The model that generates."""

    name: str
    """The name of the model's folder at the service, or a Hugging Face repository."""
    revision: str | None = None
    """The revision of the repository; null for a folder. Pushed weights are versions of the policy, not revisions."""
    vocab_size: int
    """Token ids of prompts are below this. A model may have more ids than its tokenizer has tokens."""
    max_model_len: int
    """Tokens of a prompt with its response."""


class EncodedText(Lenient):
    """A text, and the tokens that the service's tokenizer makes of it."""

    text: str
    """The text that was encoded, without special tokens around it."""
    token_ids: list[int]
    """Its tokens, in order."""


class TokenizerInfo(Lenient):
    """The tokenizer and the chat template, as `rollout_client.tokenizer_check` describes any tokenizer."""

    vocabulary_sha256: str
    """Sha-256 over all tokens with their ids, the added ones included; `GET /info/vocabulary` lists them."""
    vocabulary_size: int
    """Number of tokens."""
    encodings: list[EncodedText]
    """Texts that tell tokenizers of one vocabulary apart."""
    chat_template_sha256: str | None
    """Sha-256 of the chat template's text, without white space at its end; null without a template."""
    rendered_chat: str | None
    """A short chat as the chat template renders it; null if it refuses it. Tells whether a changed template matters."""


class ServiceVersions(Lenient):
    """Versions of the service and its parts."""

    service: str
    """The service's version."""
    contract: str
    """The version of the types on the wire. A client with another major number does not understand the service."""
    engine: str
    """Name and version of the engine."""
    ray: str
    """Ray's version."""
    transformers: str
    """The version of transformers, which renders the chat template."""


class ServiceInfo(Lenient):
    """The answer of `GET /info`."""

    model: ModelInfo
    """Which model it is, and how long its conversations may be."""
    tokenizer: TokenizerInfo
    """How text becomes tokens."""
    limits: dict[str, JsonValue]
    """Limits of a request, of all requests in flight, and of one engine; null for no limit."""
    versions: ServiceVersions
    """The versions that run."""
    policy_version: int | None
    """The current version of the weights; null while it is not known."""
    tasks: list[str]
    """The tasks that can be played."""
    follow: FollowState | None = None
    """The folder that the service takes new versions of the weights from; null without one."""
    keeps_records: bool = False
    """Whether it keeps records of rollouts that have ended, and compares them with what trainers report."""


class Vocabulary(Lenient):
    """The answer of `GET /info/vocabulary`."""

    tokens: list[str | None]
    """The token of each id; null for an id that no token has."""


ImageName = Annotated[str, Field(pattern=IMAGE_NAME)]


class BlobInfo(Lenient):
    """An image that the service keeps."""

    name: ImageName
    """`sha256:` and the hash of its content, for a part of a message: `{"type": "image", "image": name}`."""
    bytes: int = Field(ge=0)
    """Size of the file."""
    media_type: str
    """`image/png` or `image/jpeg`, by its content."""
    width: int = Field(ge=1)
    """In pixels."""
    height: int = Field(ge=1)
    """In pixels."""


MOST_TOP_K = 20
"""vLLM's default of `max_logprobs`."""
TokenSequence = Annotated[list[TokenId], Field(min_length=2, fail_fast=True)]
Start = Annotated[int, Field(ge=0)]


class ScoreRequest(Strict):
    """The body of `POST /score`."""

    sequences: list[TokenSequence] = Field(min_length=1, fail_fast=True)
    """The token ids of each sequence, at least two, because nothing comes before the first, and at most as many as the
    model takes; with `top_k` one less."""
    top_k: int = Field(default=0, ge=0, le=MOST_TOP_K)
    """For each position the ids and log-probabilities of this many of the most likely tokens come back too."""
    start: Start | Annotated[list[Start], Field(fail_fast=True)] = 0
    """The first position whose log-probability is asked for, from 0; one number for all sequences, or one for each."""
    policy: PolicyDemand = PolicyDemand()
    """Under which weights; by default the current ones. With `version` every sequence is scored by exactly that one,
    or the request is refused (409)."""
    priority: Priority = "train"
    """The share of the engines that the request gets while others wait too, as in `POST /rollout`."""
    retries: int = Field(default=3, ge=0, le=100)
    """How often the scoring of one sequence is repeated after failures of the fleet, such as a lost replica."""


class SequenceScore(Lenient):
    """The score of one sequence."""

    logprobs: list[float | None] | None
    """The log-probability of each token from `start` on; null for the first token of the sequence, which nothing comes
    before. Null as a whole if the scoring failed."""
    top_token_ids: list[list[int] | None] | None = None
    """With `top_k`: the most likely tokens of each of these positions, the most likely first."""
    top_logprobs: list[list[float] | None] | None = None
    """With `top_k`: the log-probabilities of `top_token_ids`."""
    weight_version: str | None
    """The version of the weights, as `weight_versions` names it; one version scores all tokens of a sequence."""
    error: SampleError | None = None
    """Why the scoring failed."""


class ScoreResponse(Lenient):
    """The answer of `POST /score`."""

    request_id: str
    """The request's `X-Request-ID`, or the id that the service gave it."""
    policy: PolicyVersions
    """Which weights scored the sequences."""
    scores: list[SequenceScore]
    """One per sequence, in input order."""
