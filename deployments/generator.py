"""The generator deployment: one vLLM engine per Serve replica."""

import os
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.protocols import Generation, GenerationRequest, GeneratorDescription

RESERVED_ENGINE_ARGS = {
    "logprobs_mode": "log-probabilities are always those of the sampled distribution",
}


class EngineSettings(BaseModel):
    """Which model runs on what. Any further field is passed to vLLM's `AsyncEngineArgs` as it is."""

    model_config = ConfigDict(extra="allow")

    device: Literal["gpu", "cpu"] = "gpu"
    model: str
    """A local path or a hub name."""
    tokenizer: str | None = None
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share one model, in one replica on one node."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    """Tokens; without it the model's own limit."""
    num_cpus: float = Field(default=1, ge=0)
    """Cores that Ray sets aside for one replica."""
    environment_variables: dict[str, str] = {}
    """Set in the engine's process before vLLM is imported (`VLLM_...`)."""

    @model_validator(mode="after")
    def leaves_reserved_args_alone(self) -> Self:
        for name in RESERVED_ENGINE_ARGS.keys() & (self.model_extra or {}).keys():
            raise ValueError(f"{name} cannot be set: {RESERVED_ENGINE_ARGS[name]}")
        return self

    def ray_actor_options(self) -> dict[str, float]:
        gpus = 0 if self.device == "cpu" else self.tensor_parallel_size * self.pipeline_parallel_size
        return {"num_cpus": self.num_cpus, "num_gpus": gpus}

    def engine_args(self) -> dict[str, Any]:
        return self.model_dump(exclude={"device", "num_cpus", "environment_variables"}, exclude_none=True)


class Generator:
    """Ready only when its engine is loaded and warm; unhealthy, and so replaced, when its engine died."""

    async def __init__(self, settings: EngineSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        os.environ.update(settings.environment_variables)
        from deployments.engine import Engine

        self._engine = await Engine.start(settings.engine_args())

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._engine.generate(request)

    async def describe(self) -> GeneratorDescription:
        return self._engine.describe()

    async def ongoing_generations(self) -> int:
        return self._engine.ongoing_generations

    async def check_health(self) -> None:
        await self._engine.check_health()

    def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            engine.shutdown()
