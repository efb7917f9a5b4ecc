"""The deployment that runs the agents of one task: a host whose steps may last for hours, and end with their caller."""

from deployments.agents.environment import HOST_GRACE_S
from deployments.agents.settings import AgentSettings
from deployments.environments.host import EnvironmentHost

RUNS_OF_TASK = "deployments.agents.environment:AgentRunsOfTask"


class AgentHost(EnvironmentHost):
    """One replica."""

    def __init__(self, name: str, settings: AgentSettings) -> None:
        """Raises `EnvironmentNotLoadable`: the agent cannot be run."""
        super().__init__(name, RUNS_OF_TASK, {"settings": settings}, settings.timeout_s + HOST_GRACE_S)
