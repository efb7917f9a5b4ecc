"""Which generations a replica refuses for its weights."""

from dataclasses import replace

import pytest

from deployments.failures import OtherVersionLoaded, TokensTooOld
from deployments.protocols.generation import GenerationRequest, SamplingOptions
from deployments.protocols.weight_versions import RollingActivation, refuse_other_version
from tests.patterns import whole


def request(min_weight_version: int = 0, weight_version: int | None = None) -> GenerationRequest:
    return GenerationRequest("a", [1], 1, (), SamplingOptions(), min_weight_version, weight_version)


@pytest.mark.parametrize("demanded", [request(), request(5), request(weight_version=5), request(5, 5)])
def test_weights_that_meet_the_demand_generate(demanded: GenerationRequest) -> None:
    refuse_other_version(demanded, loaded=5)


@pytest.mark.parametrize("demanded", [request(6), request(6, 6)])
def test_older_weights_than_demanded_are_refused(demanded: GenerationRequest) -> None:
    with pytest.raises(OtherVersionLoaded) as raised:
        refuse_other_version(demanded, loaded=5)
    assert str(raised.value) == "The generator replica has version 5, and is not at version 6 yet."


@pytest.mark.parametrize(
    ("demanded", "admitted"),
    [
        (request(), "ab"),
        (request(5), "ab"),
        (request(6), "b"),
        (request(5, 5), "a"),
        (request(6, 6), "b"),
        (request(7), ""),
        (replace(request(), max_staleness=0, oldest_version=5), "a"),
        (replace(request(), max_staleness=1, oldest_version=5), "ab"),
        (replace(request(), policy="run-b"), "a"),
    ],
)
def test_while_rolling_each_admits_what_its_version_may_make(demanded: GenerationRequest, admitted: str) -> None:
    rolling = RollingActivation(before=5, version=6, replicas=frozenset("b"))
    assert [replica for replica in "ab" if rolling.admits(replica, demanded)] == list(admitted)


def test_a_replica_without_the_named_policy_refuses() -> None:
    with pytest.raises(OtherVersionLoaded, match=whole("The generator replica does not have the policy run-b.")):
        refuse_other_version(replace(request(), policy="run-b"), loaded=None)


def test_newer_weights_than_the_exact_version_are_refused() -> None:
    with pytest.raises(OtherVersionLoaded) as raised:
        refuse_other_version(request(4, 4), loaded=5)
    assert str(raised.value) == (
        "The generator replica has version 5 and not version 4, which must generate every token of the rollout."
    )


def test_weights_too_far_ahead_of_the_oldest_token_are_refused() -> None:
    demanded = replace(request(), max_staleness=2, oldest_version=3)
    refuse_other_version(demanded, loaded=5)
    refuse_other_version(replace(demanded, oldest_version=None), loaded=9)
    refuse_other_version(replace(demanded, max_staleness=None), loaded=9)
    with pytest.raises(TokensTooOld) as raised:
        refuse_other_version(demanded, loaded=6)
    assert str(raised.value) == (
        "The conversation has tokens of version 3, which is 3 versions behind version 6; policy.max_staleness allows "
        "2. Begin another one."
    )
