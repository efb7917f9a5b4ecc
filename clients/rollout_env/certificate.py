"""Findings of `rollout env certify` about an environment: its checks, as a table, as JSON, and by a hash."""

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from rollout_env.environment import TaskEnvironment
from rollout_env.records import escaped_half_surrogates

Group = Literal["rules", "players", "laws", "isolation", "worth"]
Status = Literal["passed", "failed", "not offered"]
MOST_FINDINGS = 5
SKIPPED = {"__pycache__", ".git"}
"""Folders that are no part of a source."""


@dataclass(slots=True)
class CertifiedCheck:
    """One check of the panel."""

    name: str
    group: Group
    plays: int = 0
    """How many rollouts it has judged."""
    findings: list[str] = field(default_factory=list)
    """Sentences, the first `MOST_FINDINGS`."""
    note: str = ""
    """Why it is not offered, or what it has measured."""
    status: Status = "not offered"

    def judged(self, finding: str | None = None, plays: int = 1) -> None:
        """Adds plays, and what was wrong in them; a sentence is kept once."""
        self.plays += plays
        finding = escaped_half_surrogates(finding or "")
        if finding and finding not in self.findings and len(self.findings) < MOST_FINDINGS:
            self.findings.append(finding)
        self.status = "failed" if self.findings else "passed"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The checks of one environment."""

    environment: str
    """The name by which it was certified: import path, folder or task."""
    arguments: Mapping[str, Any]
    source: str
    """`source_of` the environment."""
    settings: Mapping[str, Any]
    """Those of the panel."""
    checks: Sequence[CertifiedCheck]
    measured: Mapping[str, float] = field(default_factory=dict)
    """Shares of samples by their worth to a policy, from 0 to 1."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """The certificate of a document."""
        checks = [CertifiedCheck(**check) for check in document["checks"]]
        return cls(**{field.name: document[field.name] for field in fields(cls)} | {"checks": checks})

    @property
    def passed(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    @property
    def hash(self) -> str:
        """SHA-256 of the document without its hash and its name, in hexadecimal."""
        return _hash_of(self._fields())

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {**self._fields(), "hash": self.hash}

    def _fields(self) -> dict[str, Any]:
        return {**asdict(self), "arguments": dict(self.arguments), "passed": self.passed}

    def table(self) -> Iterator[str]:
        """Lines of text: a row for each check, its findings below it, and the verdict."""
        group = ""
        for check in self.checks:
            if check.group != group:
                group = check.group
                yield group
            said = f"{check.plays} plays" if check.plays else check.note
            yield f"  {check.name:<18} {check.status:<12} {said}".rstrip()
            yield from (f"      {line}" for finding in check.findings for line in finding.splitlines())
        yield from (f"  {name:<18} {value:g}" for name, value in self.measured.items())
        failed = [check.name for check in self.checks if check.status == "failed"]
        verdict = f"fails {len(failed)} checks: {', '.join(failed)}" if failed else "passes"
        yield f"{self.environment} {verdict}. Certificate {self.hash[:16]}"


class CertificateRefused(ValueError):
    """The certificate of a file is not that of the environment. The message is a sentence."""


def hash_in(path: Path, environment: TaskEnvironment, arguments: Mapping[str, Any]) -> str:
    """The hash of the certificate in the file, which must be that of the environment as it is, and without a failure.

    Raises:
        CertificateRefused: it is not.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        given = str(found.pop("hash"))
        passed, of, source = found["passed"], found["arguments"], found["source"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CertificateRefused(f"{path} is no certificate: {type(error).__name__}: {error}.") from error
    if given != _hash_of(found):
        raise CertificateRefused(f"{path} was changed after it was made: certify the environment anew.")
    if not passed:
        raise CertificateRefused(f"{path} has checks that failed: mend the environment and certify it anew.")
    if found["settings"]["only"]:
        raise CertificateRefused(f"{path} is of some checks alone: certify the environment without --only.")
    if source != source_of(environment) or (of != arguments and environment.is_made_of is None):
        raise CertificateRefused(f"{path} is of another source or of other arguments: certify the environment anew.")
    return given


def _hash_of(fields: Mapping[str, Any]) -> str:
    told = {name: value for name, value in fields.items() if name != "environment"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def source_of(environment: TaskEnvironment) -> str:
    """SHA-256, in hexadecimal, of the file with the environment's class, or of the folder that it `is_made_of`.

    With a folder, also of how the environment is `made_with` it. A class without a file has its name in its place.
    """
    kind, folder = type(environment), environment.is_made_of
    try:
        path = Path(folder or inspect.getfile(kind))
    except (OSError, TypeError):
        return _hash_of({"class": kind.__qualname__})
    files = [one for one in path.rglob("*") if one.is_file() and not SKIPPED & set(one.parts)] if folder else [path]
    digests = {str(one.relative_to(path)): hashlib.sha256(one.read_bytes()).hexdigest() for one in files}
    return _hash_of({"files": digests, "made_with": environment.made_with})
