"""How the policy store keeps versions, and what it may read."""

from pydantic import BaseModel, ConfigDict, Field


class PolicySettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    folder: str | None = None
    """Where versions are kept. One that outlives the machine makes the current version outlive it too; without it they
    live as long as the Ray cluster, in its folder for temporary files."""
    checkpoint_roots: list[str] = []
    """Paths and fsspec URLs under which a checkpoint may lie that the service is to read itself; none by default."""
    keep_versions: int = Field(default=2, ge=1)
    """Full versions that stay on disk, the current one included, as bases of deltas."""
    wait_s: float = Field(default=60, ge=0)
    """How long a rollout that demands a version waits for it at most."""
    command_timeout_s: float = Field(default=600, gt=0)
    """A replica that takes longer to carry out one step of an update is replaced."""
    transfer_idle_s: float = Field(default=300, gt=0)
    """A weight transfer from whose trainer nothing was heard for so long is given up; its replicas are replaced."""
