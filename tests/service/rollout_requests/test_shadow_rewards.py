"""The verdicts of shadow judges in results: sums beside the rewards, in every form of the answer, through a restart."""

from typing import Any

import pytest
from pydantic_core import from_json

from deployments.environments.host import EnvironmentHost
from deployments.environments.shadows import ShadowSettings
from rollout_client import AsyncRolloutClient, RolloutResponse, SampleResult
from service.jobs.codec import fields_of, state_of
from service.remote.environment import RemoteEnvironment
from service.rollout_requests.result_encoding import json_of
from service.rollouts.episode import Episode
from tests.service.remote.in_process_handles import InProcessHandle
from tests.service.rollouts.playing import async_context, collect
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator, outcome, shadowed
from tests.service.scripted_http import ScriptedHttp

Verdicts = dict[str, float | None]
MATH = "deployments.tasks.math:MathEnvironment"
SAMPLE: dict[str, Any] = {"task_name": "math", "messages": [{"role": "user", "content": "Q"}]}


def played(*verdicts: Verdicts) -> SampleResult:
    """A rollout whose steps have these verdicts, and a reward of 1 each."""
    last = len(verdicts) - 1
    outcomes = [shadowed(outcome("O", 1.0, place == last), each) for place, each in enumerate(verdicts)]
    [result] = collect(
        [EpisodeRecipe().make()], async_context(ScriptedGenerator(["A"]), ScriptedEnvironment(outcomes))
    ).values()
    return result


@pytest.mark.parametrize(
    ("verdicts", "summed"),
    [
        ([{"style": 0.25}], {"style": 0.25}),
        ([{"style": 0.25, "length": -1.0}, {"style": 0.5, "length": 2.0}], {"style": 0.75, "length": 1.0}),
        ([{"style": 0.25}, {"style": None}, {"style": 0.5}], {"style": None}),
        ([{"style": None}, {"style": 0.5}], {"style": None}),
    ],
)
def test_the_verdicts_of_all_turns_are_summed_beside_the_rewards(verdicts: list[Verdicts], summed: Verdicts) -> None:
    result = played(*verdicts)
    assert (result.shadow_rewards, result.status) == (summed, "completed")
    assert (result.total_reward, result.rewards) == (len(verdicts), {"reward": len(verdicts)})


def test_a_result_without_shadows_has_no_field_for_them() -> None:
    environment = ScriptedEnvironment([outcome("O", 1.0, terminated=True)])
    [result] = collect([EpisodeRecipe().make()], async_context(ScriptedGenerator(["A"]), environment)).values()
    assert "shadow_rewards" not in result.model_fields_set
    assert result.shadow_rewards == {}
    assert b"shadow" not in ScriptedHttp().post({"samples": [SAMPLE]}).content


def restored(episode: Episode) -> Episode:
    other = EpisodeRecipe().make()
    other.restore(state_of(from_json(json_of(fields_of(episode.state())))))
    return other


def test_verdicts_outlive_the_process_that_has_them() -> None:
    episode = EpisodeRecipe().make()
    context = async_context(
        ScriptedGenerator(["A"]), ScriptedEnvironment([shadowed(outcome("O", 1.0, True), {"style": 0.5})])
    )
    collect([episode], context)
    assert restored(episode).result().shadow_rewards == {"style": 0.5}


def test_json_streams_and_arrow_have_the_same_verdicts() -> None:
    service = ScriptedHttp()
    service.environments["math"] = ScriptedEnvironment(
        [shadowed(outcome("O", 1.0, True), {"style": 0.25, "length": None})]
    )

    async def streamed(client: Any) -> list[SampleResult]:
        async with client.stream([SAMPLE]) as rollouts:
            return [sample async for sample in rollouts]

    answer: RolloutResponse = service.call(lambda client: client.rollout([SAMPLE]))
    arrow = service.call(lambda client: client.rollout_arrow([SAMPLE]))
    [line] = service.call(streamed)
    verdicts = {"style": 0.25, "length": None}
    assert [each.shadow_rewards for each in (answer.samples[0], arrow.samples[0], line)] == [verdicts] * 3
    assert answer.to_pandas()["shadow_rewards.style"].tolist() == [0.25]


def test_the_shadows_of_a_hosted_task_reach_the_answer_through_the_calls_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.remote.environment.own_name", lambda: "ingress")
    shadow = ShadowSettings(import_path=MATH, arguments={"wrong_reward": -1.0}, weight=2.0)
    service = ScriptedHttp()

    async def answered(client: AsyncRolloutClient) -> list[SampleResult]:
        host = EnvironmentHost("math", MATH, {}, 30.0, shadows={"harsh": shadow})
        service.environments["math"] = RemoteEnvironment("math", InProcessHandle({"e": host}).unchecked)  # type: ignore[assignment]
        samples = [SAMPLE | {"extra_env_info": {"ground_truth": truth}} for truth in ("4", "5")]
        played = (await client.rollout(samples)).samples
        closing = host.__del__()
        assert closing is not None
        await closing
        return played

    service.generator.script = ["4"]
    right, wrong = service.call(answered)
    assert (right.rewards, right.shadow_rewards) == ({"correctness": 1.0}, {"harsh": 2.0})
    assert (wrong.rewards, wrong.shadow_rewards) == ({"correctness": 0.0}, {"harsh": -2.0})
