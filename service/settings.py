"""The one argument of the app builder: what runs. How it scales stands beside it in the Serve config."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from deployments.generation.settings import EngineSettings
from deployments.policy.settings import PolicySettings
from deployments.simulation.settings import SimulatedEngineSettings

MIB = 2**20


def kind_of_engine(settings: Any) -> Literal["engine", "simulated"]:
    is_simulated = (
        "simulated" in settings if isinstance(settings, dict) else isinstance(settings, SimulatedEngineSettings)
    )
    return "simulated" if is_simulated else "engine"


AnyEngineSettings = Annotated[
    Annotated[EngineSettings, Tag("engine")] | Annotated[SimulatedEngineSettings, Tag("simulated")],
    Discriminator(kind_of_engine),
]
"""An engine or, with the key `simulated`, a simulated engine."""


class EnvironmentSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    import_path: str
    """`package.module:Class` of a `TaskEnvironment`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""


class Limits(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_body_bytes: int = Field(default=256 * MIB, ge=1)
    """A larger `POST /rollout` body is refused."""
    max_rollouts_per_request: int = Field(default=65_536, ge=1)
    """Samples times `num_generations`."""
    generation_timeout_s: float | None = Field(default=600, gt=0)
    """A generation that takes longer is tried again; none waits for ever."""
    step_timeout_s: float | None = Field(default=120, gt=0)
    """The same for an environment's step."""


class ServiceSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    engine: AnyEngineSettings
    environments: dict[str, EnvironmentSettings] = Field(min_length=1)
    """By `task_name`."""
    limits: Limits = Limits()
    policy: PolicySettings = PolicySettings()

    @model_validator(mode="after")
    def task_names_are_no_other_deployment(self) -> Self:
        if taken := {"Generator", "Ingress", "Policy"} & self.environments.keys():
            raise ValueError(f"environments: {', '.join(taken)} is the name of another deployment; choose another one")
        return self

    @model_validator(mode="after")
    def simulated_engines_keep_no_weights(self) -> Self:
        if isinstance(self.engine, SimulatedEngineSettings) and self.policy.folder is not None:
            raise ValueError("policy.folder has no meaning beside engine.simulated, which has no weights: leave it out")
        return self
