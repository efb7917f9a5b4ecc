"""Every way in which a change of the policy can be refused or fail, with what is wrong, field by field.

The policy store raises them; the ingress answers with problem documents.
"""

from typing import Self

from deployments.failures import StoreFailure


class PolicyFailure(StoreFailure):
    """A call of `/policy` was not carried out; the current version goes on serving."""


class WeightsRefused(PolicyFailure):
    """The weights are not readable, are not those of this model, or hold NaN or infinity."""

    name = "weights-refused"
    title = "The weights are refused; the current version goes on serving"


class VersionUntried(PolicyFailure):
    """No replica could try the weights: those that began died. Trying again can help."""

    status = 503
    name = "version-untried"
    title = "No replica could try the weights; the current version goes on serving"


class SourceRefused(PolicyFailure):
    """The checkpoint lies outside the configured roots, or cannot be read."""

    name = "source-refused"
    title = "The checkpoint is not read; the current version goes on serving"


class VersionRefused(PolicyFailure):
    """Versions are numbered upward and never change: this number is taken, or too low."""

    status = 409
    name = "version-refused"
    title = "The number of the version is taken or too low"


class VersionUnknown(PolicyFailure):
    """The version is not stored, or nothing of it has arrived."""

    status = 404
    name = "version-unknown"
    title = "The version is not known"

    @classmethod
    def not_stored(cls, version: int) -> Self:
        return cls.of("version", "it is not stored here, or no longer", version)


class PolicyUnknown(PolicyFailure):
    """No policy of this name is served: it was never pushed, or it was dropped."""

    status = 404
    name = "policy-unknown"
    title = "No policy of this name is served"


class ChunkMisplaced(PolicyFailure):
    """The chunk does not begin where the upload ends, or another sender has begun one."""

    status = 409
    name = "chunk-misplaced"
    title = "The chunk does not follow what has arrived"


class ChunkDamaged(PolicyFailure):
    """The bytes that arrived do not have the digest or the length that their sender named."""

    status = 400
    name = "chunk-damaged"
    title = "The bytes that arrived are not those that were sent"


class UpdateUnderWay(PolicyFailure):
    """Another update is under way, and the caller chose not to wait."""

    status = 409
    name = "update-under-way"
    title = "Another update is under way"


class PolicyNotCurrent(PolicyFailure):
    """The demanded version is not current, and did not become current in time."""

    status = 409
    name = "policy-not-current"
    title = "The demanded weights are not current; nothing was started"


class TrainerNotTrusted(PolicyFailure):
    """The config lists no trainers, or not the address at which this one listens. No replica was told of it."""

    status = 403
    name = "trainer-not-trusted"
    title = "The service receives no weights from this trainer"


class TrainersNotConfigured(PolicyFailure):
    """The service has no routes for trainers that bring their own client of a vLLM server."""

    status = 404
    name = "trainers-not-configured"
    title = "The service has no routes for trainers' own clients"


class PauseRefused(PolicyFailure):
    """A replica could not pause or go on; none stays paused for longer than its lease."""

    status = 409
    name = "pause-refused"
    title = "The replicas did not pause, or did not go on"


class TransferRefused(PolicyFailure):
    """A step of a weight transfer is out of order, or a replica failed it."""

    status = 409
    name = "transfer-refused"
    title = "The transfer cannot go on"
