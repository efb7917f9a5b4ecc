"""Every way in which a call about the record of a rollout can be refused, each a problem document of the ingress."""

from deployments.failures import StoreFailure


class RolloutRecordsNotConfigured(StoreFailure):
    """The service keeps no records of rollouts."""

    status = 501
    name = "rollout-records-not-configured"
    title = "The service keeps no records of rollouts"


def records_not_configured(field: str = "rollout_records") -> RolloutRecordsNotConfigured:
    """The failure of a request in which `field` asks for records."""
    return RolloutRecordsNotConfigured.of(field, "the config has no `rollout_records`; add `rollout_records: {}`")


class RolloutUnknown(StoreFailure):
    """The rollout never was, is another caller's, or its record is not kept any more."""

    status = 404
    name = "rollout-unknown"
    title = "There is no record of the rollout"


NO_RECORD = (
    "there is no record of it: it has not ended, it is another key's, or newer ones took its place "
    "(rollout_records.max_bytes)"
)


def rollout_unknown(rollout_id: str) -> RolloutUnknown:
    return RolloutUnknown.of("rollout_id", NO_RECORD, rollout_id)
