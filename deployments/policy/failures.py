"""Every way a change of the policy can be refused or fail; each carries what is wrong, field by field.

Raised by the policy store, surfaced as problem documents by the ingress.
"""

from typing import ClassVar

from rollout_client.problem_contract import FieldProblem


class PolicyFailure(Exception):
    """A call of `/policy` that was not carried out; what was served before goes on."""

    status: ClassVar[int] = 422
    name: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, *problems: FieldProblem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return " ".join(f"{problem.field}: {problem.message}." for problem in self.problems)


class WeightsRefused(PolicyFailure):
    """The weights are not those of this model, not finite, or not readable."""

    name = "weights-refused"
    title = "The weights are refused; the current version goes on serving"


class SourceRefused(PolicyFailure):
    """The checkpoint lies outside the configured roots, or is not there."""

    name = "source-refused"
    title = "The checkpoint is not read; the current version goes on serving"


class VersionRefused(PolicyFailure):
    """Versions are numbered upward and never change: this one is taken, or too low."""

    status = 409
    name = "version-refused"
    title = "The version cannot be brought under this number"


class VersionUnknown(PolicyFailure):
    """Nothing is known of the version."""

    status = 404
    name = "version-unknown"
    title = "The version is not known"


class ChunkMisplaced(PolicyFailure):
    """The piece does not begin where the upload ends."""

    status = 409
    name = "chunk-misplaced"
    title = "The piece does not follow what has arrived"


class ChunkDamaged(PolicyFailure):
    """What arrived does not have the digest that its sender named."""

    status = 400
    name = "chunk-damaged"
    title = "The bytes that arrived are not those that were sent"


class UpdateUnderWay(PolicyFailure):
    """Another update is under way, and the caller did not want to wait."""

    status = 409
    name = "update-under-way"
    title = "Another update is under way"


class PolicyNotCurrent(PolicyFailure):
    """The version that was demanded is not current, and did not become so in time."""

    status = 409
    name = "policy-not-current"
    title = "The demanded weights are not current; nothing was started"


class TransferRefused(PolicyFailure):
    """A step of a weight transfer that does not follow from what went before."""

    status = 409
    name = "transfer-refused"
    title = "The transfer cannot go on"
