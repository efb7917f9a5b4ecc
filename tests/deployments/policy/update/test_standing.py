"""The versions of a replica, compared with those that the store knows."""

from datetime import UTC, datetime

import pytest

from deployments.policy.replicas.commands import LoadedWeights, ReplicaRegistration
from deployments.policy.update.recovery import RegistrationState as State
from deployments.policy.update.recovery import RegistrationVerdict, classify, reported_versions
from deployments.policy.versions.version_store import KnownVersions, StoredVersion

BEFORE, AFTER = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)


def info(version: int, checksum: str | None = "c", run: str | None = "run-a", at: datetime = BEFORE) -> StoredVersion:
    return StoredVersion(version=version, kind="full", checksum=checksum, run=run, created_at=at)


def known(*stored: StoredVersion, current: int = 7, tried: tuple[StoredVersion, ...] = ()) -> KnownVersions:
    return KnownVersions(
        run="run-a",
        current=current,
        stored={version.version: version for version in stored},
        tried={version.version: version for version in tried},
    )


def holding(
    *records: StoredVersion, loaded: LoadedWeights | None = None, is_on_trial: bool = False
) -> ReplicaRegistration:
    loaded = loaded or LoadedWeights(records[0].version)
    texts = {record.version: record.model_dump_json() for record in records}
    return ReplicaRegistration("r0", None, 1, loaded, texts, is_on_trial)


OTHER_WEIGHTS = "it holds other weights as version 7 than the policy store knows under this number"
OTHER_RUN = "it holds version 9 of the run run-b, and this is the run run-a"


@pytest.mark.parametrize(
    ("registration", "knowledge", "state"),
    [
        (holding(loaded=LoadedWeights()), known(), State.KNOWN),
        (holding(info(7)), known(info(7)), State.KNOWN),
        (holding(info(5)), known(info(7)), State.KNOWN),
        (holding(info(8)), known(info(7)), State.AHEAD),
        (holding(info(1)), known(current=0), State.AHEAD),
        (holding(loaded=LoadedWeights(8)), known(info(7)), State.AHEAD),
        (holding(info(8)), known(info(7), tried=(info(8),)), State.TRIED),
        (holding(info(9)), known(info(7), tried=(info(8),)), State.AHEAD),
        (holding(info(7, None)), known(info(7)), State.KNOWN),
        (holding(info(7, None)), known(info(7, None)), State.KNOWN),
        (holding(info(7, at=AFTER)), known(info(7)), State.KNOWN),
        (holding(info(9, run=None)), known(info(7)), State.AHEAD),
        (holding(info(8), is_on_trial=True), known(info(7)), State.KNOWN),
        (holding(info(8), is_on_trial=True), known(info(7), tried=(info(8),)), State.KNOWN),
    ],
)
def test_the_state_of_a_replica_that_registers(
    registration: ReplicaRegistration, knowledge: KnownVersions, state: State
) -> None:
    assert classify(registration, knowledge) == RegistrationVerdict(state)


@pytest.mark.parametrize(
    ("registration", "knowledge", "reason"),
    [
        (holding(info(7, "d")), known(info(7)), OTHER_WEIGHTS),
        (holding(info(7, None, at=AFTER)), known(info(7)), OTHER_WEIGHTS),
        (holding(info(7, None, at=AFTER)), known(info(7, None)), OTHER_WEIGHTS),
        (holding(info(8, "d")), known(info(7), tried=(info(8),)), OTHER_WEIGHTS.replace("7", "8")),
        (holding(info(9, run="run-b")), known(info(7)), OTHER_RUN),
        (holding(info(7, "d"), is_on_trial=True), known(info(7)), OTHER_WEIGHTS),
        (holding(info(7, "d"), info(9), loaded=LoadedWeights(7, adapter=9)), known(info(7)), OTHER_WEIGHTS),
    ],
)
def test_a_replica_with_other_weights_or_of_another_run_is_different(
    registration: ReplicaRegistration, knowledge: KnownVersions, reason: str
) -> None:
    assert classify(registration, knowledge) == RegistrationVerdict(State.DIFFERENT, reason)


def test_of_versions_without_a_record_the_numbers_are_known() -> None:
    full, adapter = reported_versions(ReplicaRegistration("r0", None, 1, LoadedWeights(7, adapter=9)))
    assert (full.version, full.kind, full.checksum) == (7, "transfer", None)
    assert (adapter.version, adapter.kind, adapter.base) == (9, "adapter", 7)
    assert reported_versions(ReplicaRegistration("r0", None, 1, LoadedWeights())) == []
