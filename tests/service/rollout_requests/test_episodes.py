"""From a valid request to its episodes: prompts, options and seeds of each rollout."""

from typing import Any

import pytest

from deployments.failures import EnvironmentLost
from deployments.protocols.chat import ChatOptions
from deployments.protocols.environments import TaskDescription
from deployments.protocols.generation import SamplingOptions, derived_seed
from rollout_client.contract.rollouts import RolloutRequest, SampleInput, Sampling
from service.rollout_requests.episodes import (
    EpisodeFactory,
    _chat_options,
    _group_seed,
    _sampling_options,
    _stop_strings_of,
)
from service.rollouts.episode import Episode
from tests.service.rollout_requests.episode_making import made_episodes
from tests.service.rollouts.playing import error_of, generation_due
from tests.service.scripted_http import DESCRIPTION, LIMITS, tokenizer

SAMPLE: dict[str, Any] = {"task_name": "math", "messages": [{"role": "user", "content": "Hi"}]}
LOGGED: dict[str, Any] = {"task_name": "math", "message_log": [{"role": "user", "content": "a", "token_ids": [64, 65]}]}
FACTORY = EpisodeFactory(frozenset({"math"}), DESCRIPTION, tokenizer, LIMITS)


def made(request: dict[str, Any], request_id: str = "mine") -> list[Episode]:
    return made_episodes(FACTORY, RolloutRequest.model_validate({"samples": [SAMPLE], **request}), request_id)


def sample_input(**fields: Any) -> SampleInput:
    return SampleInput.model_validate({**SAMPLE, **fields})


def request_of(sample: SampleInput, **fields: Any) -> RolloutRequest:
    return RolloutRequest(samples=[sample], **fields)


def test_the_rollouts_of_one_sample_stand_next_to_each_other() -> None:
    episodes = made({"samples": [{**SAMPLE, "id": "a"}, {**SAMPLE, "idx": 31}], "num_generations": 2})
    identities = [episode.identity for episode in episodes]
    assert [(each.position, each.group, each.generation_index, each.id, each.idx) for each in identities] == [
        (0, 0, 0, "a", 0),
        (1, 0, 1, "a", 0),
        (2, 1, 0, None, 31),
        (3, 1, 1, None, 31),
    ]
    assert {(each.request_id, each.task_name) for each in identities} == {("mine", "math")}


def test_rollout_ids_differ_between_requests_of_one_id() -> None:
    first, second = ([episode.identity for episode in made({"num_generations": 2})] for _ in range(2))
    assert len({each.rollout_id for each in (*first, *second)}) == 4
    assert len({each.group_id for each in (*first, *second)}) == 2
    assert all(each.rollout_id.startswith("mine-") for each in (*first, *second))


def test_all_rollouts_of_a_request_have_the_share_of_its_priority() -> None:
    first, second = (
        [generation_due(episode).share for episode in made({"num_generations": 2, **priority})]
        for priority in ({}, {"priority": "interactive"})
    )
    assert ([share.weight for share in first], [share.weight for share in second]) == ([1.0, 1.0], [16.0, 16.0])
    assert first[0] is first[1]
    assert first[0].id != second[0].id


def test_a_message_log_is_taken_as_it_is_and_messages_are_rendered() -> None:
    logged, rendered = (list(generation_due(one).prompt_token_ids) for one in made({"samples": [LOGGED, SAMPLE]}))
    [message] = tokenizer.prompt(sample_input().messages or [], ChatOptions(), 100)
    assert (logged, rendered) == ([64, 65], list(message.token_ids))


def test_options_of_the_request_bound_its_episodes() -> None:
    sampling, policy = {"max_new_tokens": 7, "stop_strings": ["."]}, {"min_version": 3, "version": 5}
    asked, plain, short = (
        generation_due(made({"samples": [LOGGED], **options})[0])
        for options in ({"sampling": sampling, "policy": policy}, {}, {"max_seq_len": 50})
    )
    assert (asked.max_new_tokens, asked.stop_strings) == (7, (".",))
    assert (asked.min_weight_version, asked.weight_version) == (5, 5)
    assert (plain.max_new_tokens, short.max_new_tokens) == (DESCRIPTION.max_model_len - 2, 48)
    assert (plain.stop_strings, plain.min_weight_version, plain.weight_version) == ((), 0, None)


def test_the_episodes_of_a_request_share_its_bounds_of_versions() -> None:
    episodes = made({"samples": [LOGGED, LOGGED], "num_generations": 2, "policy": {"max_staleness": 3}})
    [bounds] = {episode.versions.bounds for episode in episodes}
    assert (bounds.version, bounds.max_staleness) == (None, 3)


def test_turns_and_retries_are_those_of_the_request() -> None:
    [episode] = made({"samples": [LOGGED], "max_rollout_turns": 1, "retries": 2})
    assert [episode.retries.take() for _ in range(3)] == [True, True, False]


def test_a_prompt_may_fill_max_seq_len_and_not_exceed_it() -> None:
    fits, exceeds = (made({"samples": [LOGGED], "max_seq_len": length})[0] for length in (2, 1))
    assert (fits.status, exceeds.status) == (None, "error")
    message = "The prompt has 2 tokens and max_seq_len is 1: shorten the prompt or raise max_seq_len."
    assert error_of(exceeds.result()) == {"kind": "request", "message": message, "retryable": False}
    assert exceeds.result().message_log == []


# Options of one sample


@pytest.mark.parametrize(
    ("sample", "request_", "expected"),
    [
        ({}, {}, ChatOptions("chat")),
        ({"messages": None, **LOGGED}, {}, ChatOptions("raw")),
        ({}, {"observation_format": "raw"}, ChatOptions("raw")),
        ({"observation_format": "chat"}, {"observation_format": "raw"}, ChatOptions("chat")),
        ({"tools": [{"name": "add"}]}, {}, ChatOptions("chat", tools=[{"name": "add"}])),
        ({}, {"chat_template_kwargs": {"a": 1}}, ChatOptions("chat", chat_template_kwargs={"a": 1})),
        (
            {"chat_template_kwargs": {}},
            {"chat_template_kwargs": {"a": 1}},
            ChatOptions("chat", chat_template_kwargs={}),
        ),
    ],
)
def test_a_samples_chat_options_win(sample: dict[str, Any], request_: dict[str, Any], expected: ChatOptions) -> None:
    given = sample_input(**sample)
    assert _chat_options(request_of(given, **request_), given) == expected


def test_an_environments_start_makes_messages_of_the_prompt() -> None:
    given = sample_input()
    started = TaskDescription("math", "", {}, has_start=True)
    assert _chat_options(request_of(given), given, started) == ChatOptions("chat", has_observations=True)


@pytest.mark.parametrize(("own", "expected"), [(None, ["."]), ([], []), (["!"], ["!"])])
def test_a_samples_own_stop_strings_come_first(own: list[str] | None, expected: list[str]) -> None:
    given = sample_input(stop_strings=own)
    assert _stop_strings_of(request_of(given, sampling=Sampling(stop_strings=["."])), given) == expected


def test_the_seed_of_a_group_is_the_samples_own_or_derived_by_position() -> None:
    own, other = sample_input(seed=5), sample_input()
    seeded = request_of(other, sampling=Sampling(seed=0))
    assert _group_seed(seeded, 3, own) == 5
    assert _group_seed(request_of(own), 3, own) == 5
    assert _group_seed(seeded, 3, other) == derived_seed(0, 3)
    assert _group_seed(request_of(other), 3, other) is None


def test_sampling_options_are_those_of_the_engine() -> None:
    options = _sampling_options(Sampling(temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, ignore_eos=True))
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 0, 0.1)
    assert (options.ignore_eos, options.seed) == (True, None)
    assert _sampling_options(Sampling(greedy=True, top_k=3)).temperature == 0.0
    assert _sampling_options(Sampling(greedy=True, top_k=3)).top_k == 3


# What a group shares


def test_the_rollouts_of_a_group_differ_in_their_seeds_alone() -> None:
    seeded = made({"samples": [{**LOGGED, "seed": 7}], "num_generations": 2, "sampling": {"top_p": 0.5}})
    assert [generation_due(episode).sampling for episode in seeded] == [
        SamplingOptions(top_p=0.5, seed=derived_seed(derived_seed(7, place), 0)) for place in range(2)
    ]
    unseeded = made({"samples": [LOGGED], "num_generations": 2})
    assert [generation_due(episode).sampling for episode in unseeded] == [SamplingOptions()] * 2


@pytest.mark.parametrize("seed", [None, 7])
def test_the_episodes_of_a_group_share_their_prompt_and_fields(seed: int | None) -> None:
    shared = {
        "id": "a name",
        "note": ["far"],
        "extra_env_info": {"state": [1]},
        "tools": [{"name": "add"}],
        "chat_template_kwargs": {"a": 1},
    }
    first, second = made({"samples": [{**LOGGED, "seed": seed, "stop_strings": ["!"], **shared}], "num_generations": 2})
    one, other = generation_due(first), generation_due(second)
    assert one.prompt_token_ids is other.prompt_token_ids
    assert one.stop_strings is other.stop_strings
    ours, theirs = first.result(), second.result()
    assert ours.message_log[0] is theirs.message_log[0]
    for name in shared:
        assert getattr(ours, name) is getattr(theirs, name)


TOOLS = [{"type": "function", "function": {"name": "add"}}]
TASK = TaskDescription("math", "Sums.", fields={}, tools=TOOLS)


@pytest.mark.parametrize(
    ("own", "given"), [({}, TOOLS), ({"tools": [{"type": "mine"}]}, [{"type": "mine"}]), ({"tools": []}, [])]
)
def test_the_tools_of_a_task_are_those_of_its_samples_without_tools(own: dict[str, Any], given: list[Any]) -> None:
    request = request_of(sample_input(**own), num_generations=2)
    first, second = made_episodes(FACTORY, request, "mine", {"math": TASK})
    assert first.result().tools == given
    assert first.result().tools is second.result().tools


def test_samples_of_a_task_that_is_not_known_fail_and_the_others_do_not() -> None:
    lost = EnvironmentLost("The replica of environment 'math' is gone.")
    [episode] = made_episodes(FACTORY, request_of(sample_input()), "mine", {"math": lost})
    assert error_of(episode.result()) == {"kind": "environment", "message": str(lost), "retryable": True}
