"""Settings of weight transfers."""

from pydantic import Field, field_validator

from deployments.policy.transfer.trusted_trainers import TrustedTrainer
from deployments.strict_settings import StrictSettings


class TransferSettings(StrictSettings):
    """Weights from a trainer's memory straight into the engines. Off unless `trainers` names who may send them."""

    trainers: list[str] = Field(default_factory=list)
    """Where trainers may listen that replicas connect to: `host:port` or `host:first-last`, where the host is a name,
    an IP address or a network (`10.1.0.0/16:29500-29600`, `[fd00::1]:29500`). List only machines that you trust as much
    as the service's own: vLLM unpickles what they send."""
    rendezvous_timeout_s: float = Field(default=30, gt=0)
    """A trainer that a replica cannot connect to within so many seconds is refused. Generations go on meanwhile."""
    save_weights: bool = True
    """Whether one replica writes what arrives to a file as well, from which the policy store gets it afterwards. Then a
    replica that starts later loads it, and a transfer that breaks off later costs no replica. Lengthens the pause by
    the time to copy the weights to the memory of the host; a transfer that follows at once waits for the file."""

    @field_validator("trainers")
    @classmethod
    def are_addresses(cls, trainers: list[str]) -> list[str]:
        for trainer in trainers:
            TrustedTrainer.parse(trainer)
        return trainers
