"""The `engine:` section of a Serve config where a simulated engine takes the place of vLLM. Imports no Ray."""

from typing import Any, Literal

from pydantic import Field, model_validator

from deployments.chat.tokenizer_protocol import SplitSpecialTokens
from deployments.simulation.timing import Timing
from deployments.strict_settings import StrictSettings


class SimulatedEngineSettings(StrictSettings):
    """A simulated engine: `simulated` says how fast it is."""

    device: Literal["cpu"] = "cpu"
    model: str
    """A local path or a Hugging Face repository; only its tokenizer is read."""
    tokenizer: str | None = None
    """A local path or a Hugging Face repository; by default that of `model`."""
    split_special_tokens: SplitSpecialTokens = "observations"
    """As for an engine."""
    max_model_len: int = Field(ge=1)
    """Tokens of prompt and generation."""
    num_cpus: float = Field(default=0.1, ge=0)
    """CPU cores that Ray reserves for one replica."""
    simulated: Timing

    @model_validator(mode="before")
    @classmethod
    def refuse_engine_args(cls, settings: Any) -> Any:
        for name in settings.keys() - cls.model_fields.keys() if isinstance(settings, dict) else ():
            raise ValueError(
                f"{name} has no meaning beside simulated, which takes the place of an engine: leave it out"
            )
        return settings

    def ray_actor_options(self) -> dict[str, float]:
        """The cores that Ray reserves for one replica."""
        return {"num_cpus": self.num_cpus}
