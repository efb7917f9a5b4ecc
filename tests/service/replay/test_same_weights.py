"""Which version has the weights of a record now, or what to do to have it."""

from datetime import UTC, datetime
from typing import Any

import pytest

from rollout_client.contract.base import VersionLabel
from rollout_client.contract.policy import NamedPolicyState, PolicyState, VersionInfo
from service.replay.replayer import _serving

AT = datetime.fromtimestamp(0, UTC)


def info(version: int, kind: Any = "full", checksum: str | None = None, **further: Any) -> VersionInfo:
    return VersionInfo(version=version, kind=kind, checksum=checksum, created_at=AT, **further)


def state(
    current: int, *versions: VersionInfo, named: dict[str, int | None] | None = None, **further: Any
) -> PolicyState:
    states = [
        NamedPolicyState(name=name, current=number, next_version=9, **further) for name, number in (named or {}).items()
    ]
    known = [info(0, "initial"), *versions]
    return PolicyState(current=current, versions=known, replicas=[], transfer_world_size=1, named=states)


@pytest.mark.parametrize(
    ("version", "known", "now"),
    [
        (3, state(3, info(3)), 3),
        (3, state(5, info(5, rollback_of=3)), 5),
        (3, state(6, info(5, rollback_of=3), info(6, rollback_of=5)), 6),
        (5, state(6, info(5, rollback_of=3), info(6, rollback_of=3)), 6),
        (0, state(4, info(4, rollback_of=0)), 4),
        (3, state(4, info(3, checksum="c"), info(4, checksum="c")), 4),
        (3, state(7, info(1), info(3, "adapter", "c", base=1), info(7, "adapter", "c", base=1, rollback_of=3)), 7),
    ],
)
def test_the_same_weights_under_another_number_will_do(version: int, known: PolicyState, now: int) -> None:
    assert _serving(VersionLabel(None, version), known) == VersionLabel(None, now)


@pytest.mark.parametrize(
    ("version", "known", "sentence"),
    [
        (3, state(4, info(3), info(4)), "rollout policy rollback 3`"),
        (2, state(4, info(3), info(4)), "the service has the weights of 0, 3, 4 alone"),
        (3, state(4, info(3), info(4, checksum=None)), "rollback 3"),
        # The same adapter on other weights.
        (
            3,
            state(5, info(1), info(2), info(3, "adapter", "c", base=1), info(5, "adapter", "c", base=2)),
            "rollback 3 --name again`",
        ),
    ],
)
def test_other_weights_are_refused_with_what_can_be_had(version: int, known: PolicyState, sentence: str) -> None:
    refused = _serving(VersionLabel(None, version), known)
    assert isinstance(refused, str)
    assert refused.startswith(f"version {version} made tokens of it, and version {known.current} is current; ")
    assert sentence in refused


def test_of_a_named_policy_the_current_version_alone_will_do() -> None:
    known = state(0, named={"run-a": 2, "run-b": None})
    assert _serving(VersionLabel("run-a", 2), known) == VersionLabel("run-a", 2)
    assert _serving(VersionLabel("run-a", 1), known) == (
        "run-a/1 made tokens of it, and of a named policy only the current version is kept"
    )


@pytest.mark.parametrize(("checksum", "base", "is_same"), [("c", 1, True), ("d", 1, False), ("c", 2, False)])
def test_an_adapter_that_is_served_again_under_a_name_will_do(checksum: str, base: int, is_same: bool) -> None:
    known = state(
        4, info(1), info(2), info(3, "adapter", "c", base=1), info(4), named={"again": 1}, checksum=checksum, base=base
    )
    assert (_serving(VersionLabel(None, 3), known) == VersionLabel("again", 1)) == is_same
