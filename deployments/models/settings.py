"""Settings of the models that environments ask. Imports neither Ray nor torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, HttpUrl, field_validator, model_validator

from deployments.strict_settings import StrictSettings, UrlWithoutKey
from rollout_client.contract.base import Priority
from rollout_env.users import STOP


class ChatModelSettings(StrictSettings):
    """A model behind an OpenAI-compatible server (`POST /chat/completions`), or a policy of this service."""

    base_url: UrlWithoutKey | None = None
    """Address of the server, with `/v1` where it has that, and without credentials: keys come from the environment. By
    default this service."""
    model: str | None = None
    """Its name there; needed with `base_url`, unless that is a service of this kind, with `policy`."""
    policy: str | None = None
    """With a service of this kind: the named policy that answers; by default the one without a name."""
    version: int | None = Field(default=None, ge=0)
    """With a service of this kind: the version that must answer, which must be current; by default the current one."""
    priority: Priority | None = None
    """With a service of this kind: the share of its engines, by default `interactive`. With `batch` it answers in the
    gaps that others leave, and a step that asks it waits as long."""
    api_key_variable: str | None = None
    """The environment variable of the service's processes that holds the key; without it no key is sent."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of each request, such as `temperature` and `max_tokens`."""
    max_concurrent_calls: int = Field(default=32, ge=1)
    """Concurrent calls of one environment replica; further ones wait."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one attempt, in seconds. All attempts together are bounded by `limits.step_timeout_s`."""
    retries: int = Field(default=5, ge=0)
    """Further attempts after failures that may pass: no connection, no answer in time, 408, 409, 425, 429, 5xx."""

    @field_validator("base_url")
    @classmethod
    def has_no_query(cls, url: HttpUrl | None) -> HttpUrl | None:
        if url is not None and url.query:
            raise ValueError("a key in the address would be in logs: name the variable that has it in api_key_variable")
        return url

    @model_validator(mode="after")
    def names_a_model(self) -> Self:
        if self.base_url is not None and self.model is None and self.policy is None:
            raise ValueError("model is missing: the name of the model at base_url")
        return self

    @property
    def query(self) -> dict[str, str | float]:
        """Parameters of the address of each call."""
        demand = {"policy": self.policy, "version": self.version, "priority": self.priority}
        return {name: value for name, value in demand.items() if value is not None}


class UserSimulatorSettings(StrictSettings):
    """A user who talks back, played by one of the task's `models`. Its turns are observations, masked as all are."""

    model: str
    """The name of the model under `models` of the task."""
    persona: str = ""
    """Who the user is, for samples that do not say it."""
    goal: str = ""
    """The user's aim and all that they know, for samples that do not say it."""
    stop: str = Field(default=STOP, min_length=1)
    """Text by which the model ends the conversation."""
    max_turns: int = Field(default=16, ge=1)
    """Messages of the user in a conversation, those of the prompt included; the response to the last one ends it."""
    attempts: int = Field(default=3, ge=1, le=10)
    """How often the model is asked for a turn that has text. After that the step fails, and is made again."""


class RewardModelSettings(StrictSettings):
    """A sequence-classification model, in a deployment of its own."""

    model: str
    """A local path or a Hugging Face repository, which `transformers` loads for sequence classification."""
    device: Literal["cpu", "gpu"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of its computation."""
    label: int = Field(default=0, ge=0)
    """Index of the output that is the score."""
    max_length: int = Field(default=4096, ge=1)
    """Tokens of a conversation. A longer one loses its beginning."""
    max_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens of one forward pass, padding included; a conversation that is longer goes alone."""
    num_cpus: Annotated[float, Field(ge=0)] = 0.2
    """Cores that Ray reserves for one replica."""

    def ray_actor_options(self) -> dict[str, float]:
        """The cores and GPUs that Ray reserves for one replica."""
        return {"num_cpus": self.num_cpus, "num_gpus": 0 if self.device == "cpu" else 1}
