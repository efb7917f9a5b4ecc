"""What a replica holds, compared with what the store knows."""

from datetime import UTC, datetime

import pytest

from deployments.policy.replicas.commands import LoadedWeights, ReplicaRegistration
from deployments.policy.update.recovery import RegistrationVerdict, Standing, held_versions, standing_of
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


@pytest.mark.parametrize(
    ("registration", "knowledge", "verdict"),
    [
        (holding(loaded=LoadedWeights()), known(), RegistrationVerdict(Standing.KNOWN)),
        (holding(info(7)), known(info(7)), RegistrationVerdict(Standing.KNOWN)),
        (holding(info(5)), known(info(7)), RegistrationVerdict(Standing.KNOWN)),
        (holding(info(8)), known(info(7)), RegistrationVerdict(Standing.AHEAD)),
        (holding(info(1)), known(current=0), RegistrationVerdict(Standing.AHEAD)),
        (holding(loaded=LoadedWeights(8)), known(info(7)), RegistrationVerdict(Standing.AHEAD)),
        (holding(info(8)), known(info(7), tried=(info(8),)), RegistrationVerdict(Standing.TRIED)),
        (holding(info(9)), known(info(7), tried=(info(8),)), RegistrationVerdict(Standing.AHEAD)),
        (holding(info(7, "d")), known(info(7)), RegistrationVerdict(Standing.DIFFERENT, OTHER_WEIGHTS)),
        (holding(info(7, None)), known(info(7)), RegistrationVerdict(Standing.KNOWN)),
        (holding(info(7, None, at=AFTER)), known(info(7)), RegistrationVerdict(Standing.DIFFERENT, OTHER_WEIGHTS)),
        (holding(info(7, None)), known(info(7, None)), RegistrationVerdict(Standing.KNOWN)),
        (
            holding(info(7, None, at=AFTER)),
            known(info(7, None)),
            RegistrationVerdict(Standing.DIFFERENT, OTHER_WEIGHTS),
        ),
        (holding(info(7, at=AFTER)), known(info(7)), RegistrationVerdict(Standing.KNOWN)),
        (
            holding(info(8, "d")),
            known(info(7), tried=(info(8),)),
            RegistrationVerdict(Standing.DIFFERENT, OTHER_WEIGHTS.replace("7", "8")),
        ),
        (
            holding(info(9, run="run-b")),
            known(info(7)),
            RegistrationVerdict(Standing.DIFFERENT, "it holds version 9 of the run run-b, and this is the run run-a"),
        ),
        (holding(info(9, run=None)), known(info(7)), RegistrationVerdict(Standing.AHEAD)),
        (holding(info(8), is_on_trial=True), known(info(7)), RegistrationVerdict(Standing.KNOWN)),
        (holding(info(8), is_on_trial=True), known(info(7), tried=(info(8),)), RegistrationVerdict(Standing.KNOWN)),
        (
            holding(info(7, "d"), is_on_trial=True),
            known(info(7)),
            RegistrationVerdict(Standing.DIFFERENT, OTHER_WEIGHTS),
        ),
        (
            holding(info(7, "d"), info(9), loaded=LoadedWeights(7, adapter=9)),
            known(info(7)),
            RegistrationVerdict(Standing.DIFFERENT, OTHER_WEIGHTS),
        ),
    ],
)
def test_the_standing_of_a_replica(
    registration: ReplicaRegistration, knowledge: KnownVersions, verdict: RegistrationVerdict
) -> None:
    assert standing_of(registration, knowledge) == verdict


def test_of_versions_without_a_record_the_numbers_are_known() -> None:
    full, adapter = held_versions(ReplicaRegistration("r0", None, 1, LoadedWeights(7, adapter=9)))
    assert (full.version, full.kind, full.checksum) == (7, "transfer", None)
    assert (adapter.version, adapter.kind, adapter.base) == (9, "adapter", 7)
    assert held_versions(ReplicaRegistration("r0", None, 1, LoadedWeights())) == []
