"""Settings of the models that environments ask. Imports neither Ray nor torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, HttpUrl, field_validator

from deployments.strict_settings import StrictSettings, UrlWithoutKey


class ChatModelSettings(StrictSettings):
    """A model behind an OpenAI-compatible server (`POST /chat/completions`)."""

    base_url: UrlWithoutKey
    """Address of the server, with `/v1` where it has that, and without credentials: keys come from the environment."""
    model: str
    """Its name there."""
    api_key_variable: str | None = None
    """The environment variable of the service's processes that holds the key; without it no key is sent."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of each request, such as `temperature` and `max_tokens`."""
    max_concurrent_calls: int = Field(default=32, ge=1)
    """Concurrent calls of one environment replica; further ones wait."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one attempt, in seconds."""
    give_up_after_s: float = Field(default=90.0, gt=0)
    """Seconds after which no further attempt starts, and the step is repeated. With `timeout_s` it should be less than
    `limits.step_timeout_s`."""
    retries: int = Field(default=5, ge=0)
    """Further attempts after failures that may pass: no connection, no answer in time, 408, 409, 425, 429, 5xx."""

    @field_validator("base_url")
    @classmethod
    def has_no_query(cls, url: HttpUrl) -> HttpUrl:
        if url.query:
            raise ValueError("a key in the address would be in logs: name the variable that has it in api_key_variable")
        return url


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
    max_batch_size: int = Field(default=64, ge=1)
    """Conversations of one forward pass."""
    max_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens of one forward pass, padding included; a conversation that is longer goes alone."""
    max_waiting: int = Field(default=65536, ge=1)
    """Conversations that wait in one replica. Those beyond are refused, and their steps made again."""
    num_cpus: Annotated[float, Field(ge=0)] = 0.2
    """Cores that Ray reserves for one replica."""

    def ray_actor_options(self) -> dict[str, float]:
        """The cores and GPUs that Ray reserves for one replica."""
        return {"num_cpus": self.num_cpus, "num_gpus": 0 if self.device == "cpu" else 1}
