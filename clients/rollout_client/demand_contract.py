"""Which weights a request demands: the `policy` of `POST /rollout` and of `POST /score`."""

from pydantic import Field

from rollout_client.contract.base import Strict
from rollout_client.policy_names import PolicyName


class PolicyDemand(Strict):
    """Which weights a request may begin with. Newer weights can replace them while it runs."""

    name: PolicyName | None = None
    """The policy, one of those that `GET /policy` lists under `named`: adapters, each with versions of its own, which
    the other fields count. By default the policy without a name."""
    min_version: int | None = Field(default=None, ge=0)
    """The request waits until this version, or a newer one, is current."""
    version: int | None = Field(default=None, ge=0)
    """The request waits until exactly this version is current; it is refused at once when a newer one is."""
    wait_s: float | None = Field(default=None, ge=0)
    """The request is refused (409) after this many seconds; the service's own limit is the default and the maximum."""


class RolloutDemand(PolicyDemand):
    """Which weights may generate the tokens of rollouts. Newer ones can replace them unless these fields say more."""

    version: int | None = Field(default=None, ge=0)
    """The request waits until exactly this version is current; it is refused at once when a newer one is. This version
    generates every token: a rollout that needs further tokens when a newer one has taken its place has an error of kind
    `policy`, and its log holds the tokens of this version."""
    max_staleness: int | None = Field(default=None, ge=0)
    """A rollout is cut off, with `status: stale`, as soon as the version that generated its oldest token is more than
    this many versions behind the current one. It is a difference of version numbers: where they skip numbers, it counts
    those too. By default no rollout is cut off."""
