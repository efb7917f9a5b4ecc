"""Rollouts that a seeded engine has played, generated again: equal, or found at the token that was changed."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.failures import GenerationLost
from deployments.policy.failures import PolicyNotCurrent
from deployments.protocols.generation import Generation, GenerationRequest, SamplingOptions
from rollout_client.contract.base import VersionLabel
from rollout_client.contract.messages import MediaRange, WeightVersionSpan
from rollout_client.contract.origins import ReplayRecord
from rollout_client.contract.records import ReplayResponse, TokenDifference
from rollout_client.contract.rollouts import SampleResult
from service.access.keys import ANYBODY
from service.problems import RequestProblem
from service.replay.recorded_parts import DRAWS_UNKNOWN, NOT_DRAWN, ReplayableRollout
from service.replay.replayer import Replayer
from service.rollout_records.recorder import _plain_fields
from service.rollouts.episode_records import ServiceBuild
from tests import virtual_time
from tests.service.replay.seeded_engine import SeededGenerator, SeededReplicas, ServedVersions, logprobs_after
from tests.service.rollouts.playing import play
from tests.service.scripted import DESCRIPTION, CharacterChatTokenizer, EpisodeRecipe, ScriptedEnvironment, outcome

SEEDED = SamplingOptions(temperature=0.5, seed=7)
GREEDY = SamplingOptions(temperature=0.0)
PLAIN = SamplingOptions()


def played(
    sampling: SamplingOptions = SEEDED,
    cuts: Sequence[int | None] = (),
    versions: Sequence[int] = (),
    turns: int = 3,
    **recipe: Any,
) -> SampleResult:
    """As a caller gets it."""
    asked = EpisodeRecipe(sampling=sampling, max_rollout_turns=turns, retries=100, **recipe)
    generator = SeededGenerator(cuts=cuts, versions=versions)
    return as_read(play(asked, generator, ScriptedEnvironment([outcome("O"), outcome("PQ")])))


def as_read(result: SampleResult) -> SampleResult:
    return SampleResult.model_validate(_plain_fields(result))


def replayed(
    result: SampleResult, replicas: SeededReplicas | None = None, served: ServedVersions | None = None
) -> ReplayResponse:
    seeded: Any = replicas or SeededReplicas()
    build = CharacterChatTokenizer(), DESCRIPTION, ServiceBuild()
    replayer = Replayer(seeded, served or ServedVersions(), *build)
    return virtual_time.run(replayer.replay(replayer.read(result), "r", ANYBODY))


def difference_in(again: ReplayResponse) -> TokenDifference:
    assert again.difference is not None
    return again.difference


def record_of(result: SampleResult) -> ReplayRecord:
    assert result.replay is not None
    return result.replay


def other_letter(token_id: int) -> int:
    return ord("a") if token_id != ord("a") else ord("b")


lengths = st.integers(1, 12)


@given(
    sampling=st.sampled_from([SEEDED, GREEDY]),
    cuts=st.lists(st.none() | st.integers(0, 6), max_size=8),
    versions=st.lists(st.integers(0, 3), max_size=6).map(sorted),
    max_new_tokens=st.none() | lengths,
    max_seq_len=st.integers(2, 30),
    stop_strings=st.lists(st.sampled_from(["a", "bc", "dd"]), max_size=2).map(tuple),
    turns=st.integers(1, 4),
)
def test_a_rollout_is_equal_whatever_interrupted_it(
    sampling: SamplingOptions,
    cuts: Sequence[int | None],
    versions: Sequence[int],
    max_new_tokens: int | None,
    max_seq_len: int,
    stop_strings: tuple[str, ...],
    turns: int,
) -> None:
    limits: dict[str, Any] = {"max_seq_len": max_seq_len, "max_new_tokens": max_new_tokens}
    result = played(sampling, cuts, versions, turns, stop_strings=stop_strings, **limits)
    if result.replay is None:
        assert not any(message.generation_logprobs for message in result.message_log)
        return
    again = replayed(result)
    assert again.verdict == "equal"
    assert again.tokens == sum(len(message.generation_logprobs or ()) for message in result.message_log)


@given(place=st.integers(0, 10_000), sampling=st.sampled_from([SEEDED, GREEDY]), change=st.sampled_from("ils"))
def test_a_changed_token_logprob_or_end_is_found_in_place(place: int, sampling: SamplingOptions, change: str) -> None:
    result = played(sampling, stop_strings=("ab",), max_new_tokens=8)
    places = [(origin.message, token) for origin in record_of(result).generations for token in range(origin.end)]
    message, token = places[place % len(places)]
    changed = result.message_log[message]
    assert changed.generation_logprobs is not None
    if change == "i":
        changed.token_ids[token] = other_letter(changed.token_ids[token])
    elif change == "l":
        changed.generation_logprobs[token] += 0.001
    elif token:
        del changed.token_ids[token:], changed.generation_logprobs[token:]
        for origin in record_of(result).generations:
            origin.end = token if origin.message == message else origin.end
    else:
        return
    again = replayed(result)
    assert (difference_in(again).message, difference_in(again).token) == (message, token)
    is_alone = all(each.verdict in ("equal", "equal_ids") for each in again.generations)
    assert again.verdict == ("equal_ids" if change == "l" and is_alone else "parts")


def test_where_it_parts_both_tokens_have_their_probabilities() -> None:
    result = played(turns=1)
    ids = result.message_log[1].token_ids
    was, ids[2] = ids[2], other_letter(ids[2])
    difference = difference_in(replayed(result))
    after = logprobs_after("0", [ord("Q"), *ids[:2]], 0.5)
    assert (difference.recorded_id, difference.recorded_text) == (ids[2], chr(ids[2]))
    assert (difference.replayed_id, difference.replayed_text) == (was, chr(was))
    assert difference.replayed_logprob == pytest.approx(after[chr(was)], abs=1e-5)
    assert difference.recorded_logprob == pytest.approx(after[chr(was)], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "value"), [("seed", 8), ("temperature", 0.7), ("max_new_tokens", 9), ("generations.0.stop_strings", ["c"])]
)
def test_a_changed_number_of_the_record_is_found(path: str, value: object) -> None:
    result = played(max_new_tokens=6, seed=None)
    set_at(result, f"replay.{path}", value)
    again = replayed(result)
    assert again.verdict in ("parts", "equal_ids")
    assert difference_in(again)


def test_what_cannot_be_drawn_again_says_why() -> None:
    again = replayed(played(PLAIN))
    assert (again.verdict, again.tokens, again.largest_difference) == ("not_compared", 0, None)
    assert {each.reason for each in again.generations} == {NOT_DRAWN}


def test_what_other_weights_went_on_with_is_drawn_again_if_greedy() -> None:
    for sampling, reason in ((GREEDY, None), (SEEDED, DRAWS_UNKNOWN), (SamplingOptions(seed=7), DRAWS_UNKNOWN)):
        result = played(sampling, turns=1)
        length = len(result.message_log[1].token_ids)
        result.message_log[1].weight_versions = [
            WeightVersionSpan(version="0", start=0, end=1),
            WeightVersionSpan(version="1", start=1, end=length),
        ]
        parts = ReplayableRollout(result, DESCRIPTION).parts
        asked = [(part.start, part.end, part.request.max_new_tokens) for part in parts]
        assert asked == [(0, 1, 1), (1, length, length - 1)]
        assert [part.reason for part in parts] == [None, reason]


def test_what_shows_images_is_drawn_with_them() -> None:
    result, replicas = played(SEEDED), SeededReplicas()
    result.message_log[0].mm_ranges = [IMAGE]
    assert replayed(result, replicas).verdict == "equal"
    assert [[span.name for span in request.images] for _, request in replicas.requests] == [[IMAGE.media]] * 3


def test_of_a_rollout_without_a_generation_nothing_is_compared() -> None:
    result = played()
    record_of(result).generations.clear()
    del result.message_log[1:]
    answer = replayed(result)
    assert (answer.verdict, answer.tokens, answer.generations) == ("not_compared", 0, [])


def test_a_version_that_is_gone_is_told_beside_what_could_be_compared() -> None:
    result = played(versions=[1, 2])
    again = replayed(result, served=ServedVersions({VersionLabel(None, 1): "version 1 is gone"}))
    assert again.verdict == "not_compared"
    assert [(each.verdict, each.reason) for each in again.generations][:2] == [
        ("not_compared", "version 1 is gone"),
        ("equal", None),
    ]
    gone = ServedVersions({VersionLabel(None, number): f"version {number} is gone" for number in (1, 2)})
    with pytest.raises(PolicyNotCurrent, match="version 1 is gone"):
        replayed(result, served=gone)


def test_weights_that_change_in_the_middle_of_a_replay_are_noticed() -> None:
    again = replayed(played(turns=1), SeededReplicas(other_version="4"))
    assert again.verdict == "not_compared"
    assert again.generations[0].reason == "Other weights took the place of version 0 in the middle of the replay."


def test_a_lost_generation_is_made_again() -> None:
    replicas = SeededReplicas(failures=[GenerationLost("gone")])
    assert replayed(played(turns=1), replicas).verdict == "equal"
    assert len(replicas.requests) == 2


@pytest.mark.parametrize(("names", "expected"), [(("b", "a"), "a"), (("b", "c"), "b")])
def test_the_replica_of_the_record_is_taken_and_another_one_if_it_is_gone(names: Sequence[str], expected: str) -> None:
    replicas = SeededReplicas(names)
    again = replayed(played(turns=1), replicas)
    assert {replica for replica, _ in replicas.requests} == {expected}
    assert {each.replica for each in again.generations} == {expected}


def test_software_that_differs_is_a_note_and_no_part_of_the_verdict() -> None:
    result = played(turns=1)
    record_of(result).service_version, record_of(result).engine = "0.1", "other"
    again = replayed(result)
    assert again.verdict == "equal"
    assert again.notes == [
        "Service version 0.1 played it, and  runs.",
        "The engine has another version or other settings than the one that played it.",
    ]


IMAGE = MediaRange(media=f"sha256:{'0' * 64}", start=0, end=1)


def set_at(result: SampleResult, path: str, value: object) -> None:
    """Sets what a path such as `replay.generations.0.message` leads to."""
    *parents, last = path.split(".")
    owner: Any = result
    for name in parents:
        owner = owner[int(name)] if name.isdigit() else getattr(owner, name)
    if last.isdigit():
        owner[int(last)] = value
    else:
        setattr(owner, last, value)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("replay.generations.0.message", 0, "rollout.replay.generations[0].message"),
        ("replay.generations.2.message", 1, "rollout.replay.generations[2].message"),
        ("replay.generations.0.end", 99, "rollout.replay.generations[0]"),
        ("message_log.1.token_ids.0", 0x110000, "rollout.message_log[1].token_ids[0]"),
        ("message_log.1.generation_logprobs", [], "rollout.message_log[1]"),
        ("message_log.1.mm_ranges", [IMAGE], "rollout.message_log[1]"),
        ("replay.max_seq_len", 2, "rollout.replay.generations[0]"),
        ("replay", None, "rollout.replay"),
    ],
)
def test_what_cannot_be_a_rollout_of_the_service_is_refused_by_its_field(path: str, value: object, field: str) -> None:
    result = played()
    set_at(result, path, value)
    with pytest.raises(RequestProblem) as refused:
        replayed(result)
    assert refused.value.problem.status == 422
    assert [error.field for error in refused.value.problem.errors] == [field]


def test_a_log_probability_that_is_not_a_number_is_never_equal() -> None:
    class NotFinite(SeededReplicas):
        async def generate_on(self, replica: str, request: GenerationRequest) -> Generation:
            made = await super().generate_on(replica, request)
            return replace(made, logprobs=[math.nan, *made.logprobs[1:]])

    again = replayed(played(turns=1), NotFinite())
    assert (again.verdict, difference_in(again).token) == ("equal_ids", 0)
