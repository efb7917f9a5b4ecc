"""Settings of a task type whose rollouts are tasks in Harbor's format. Imports neither Ray nor vLLM."""

from pydantic import Field

from deployments.sandbox.providers.interface import ProviderName
from deployments.strict_settings import StrictSettings

TIMES = {"create": "sandbox_create_s", "run": "agent_run_s", "judge": "verifier_s", "destroy": "sandbox_destroy_s"}
"""The metrics of a rollout with the seconds that each of its steps in a sandbox has taken."""


class SandboxProviderSettings(StrictSettings):
    """Where the sandboxes of rollouts come from."""

    provider: ProviderName = "local"
    """`local`: bubblewrap on the machine of the replica."""
    options: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Arguments of the provider, which its page lists. Keys come from environment variables, never from here."""


class HarborSettings(StrictSettings):
    """Tasks in Harbor's format, and the sandboxes in which they are played."""

    tasks: str
    """A folder whose folders are tasks, or the folder of one task."""
    passed_variables: list[str] = Field(default_factory=list)
    """Names of variables of the service's own processes that tasks may take by `${NAME}`, for the sandbox in which the
    agent works and for their verifiers. All others stay with the service: there are keys among them."""
    sandbox: SandboxProviderSettings = SandboxProviderSettings()
