"""What `rollout top` makes of readings: the recorded ones, and those of services that say less."""

import pytest

from rollout_client.cli.top.command import duration_text, percent_text, rate_text
from rollout_client.cli.top.metrics import Series, values_of
from rollout_client.cli.top.view import GeneratorView, PolicyView, Reading, TaskView, Top
from rollout_client.contract.info import DegradedPart
from rollout_client.contract.policy import NamedPolicyState, PolicyState, ReplicaPolicy
from tests.clients.cli.top.recorded import FIRST, GENERATOR, SECOND, SECONDS_BETWEEN

POLICY = PolicyState(current=0, versions=[], replicas=[ReplicaPolicy(replica_id=GENERATOR, version=0)])


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def test_two_recorded_pages_become_the_figures_of_the_time_between() -> None:
    top = Top(window_s=30)
    top.take(Reading(100.0, values_of(FIRST), POLICY))
    view = top.take(Reading(100.0 + SECONDS_BETWEEN, values_of(SECOND), POLICY))
    assert (view.is_answering, view.is_ready, view.silent_s) == (True, True, None)
    assert view.replicas == {"Generator": 1, "Ingress": 1, "Jobs": 1, "Policy": 1, "math": 1, "sliding_puzzle": 1}
    assert (view.in_flight, view.waiting) == (64, 0)
    assert rounded(view.turns_per_s) == rounded((5451 - 3356) / SECONDS_BETWEEN)
    assert rounded(view.tokens_per_s) == rounded((74000 - 41181) / SECONDS_BETWEEN)
    assert rounded(view.rollouts_per_s) == 98.064
    assert [(policy.name, policy.version, rounded(policy.age_s)) for policy in view.policies] == [("", 0, 27.272)]
    [generator] = view.generators
    assert (generator.replica_id, generator.version, generator.running, generator.waiting) == (GENERATOR, 0, 5, 0)
    assert (rounded(generator.prefix_cache_hits), rounded(generator.kv_cache_usage)) == (0.487, 0.001)
    assert [(task.task_name, task.replicas, rounded(task.mean_reward)) for task in view.tasks] == [
        ("math", 1, 0.592),
        ("sliding_puzzle", 1, 0.131),
    ]


def test_a_service_without_metrics_shows_its_policy_and_readiness() -> None:
    degraded = DegradedPart(part="environment", task_name="code", reason="No answer.")
    view = Top(30).take(Reading(0.0, None, POLICY, None, None, (degraded,)))
    assert (view.rollouts_per_s, view.in_flight, view.degraded) == (None, None, [degraded])
    assert view.policies == [PolicyView(name="", version=0)]
    assert view.generators == [GeneratorView(replica_id=GENERATOR, version=0)]


def test_a_key_that_may_not_see_the_policy_still_sees_the_versions_and_engines_of_the_metrics() -> None:
    view = Top(30).take(Reading(0.0, values_of(FIRST)))
    assert [(policy.name, policy.version) for policy in view.policies] == [("", 0)]
    assert [(each.replica_id, each.version) for each in view.generators] == [(GENERATOR, None)]


def test_a_service_that_goes_away_is_silent_and_its_rates_go_on_when_it_comes_back() -> None:
    turns = Series("rollout_turns_total", (("task_name", "math"),))
    top = Top(30)
    top.take(Reading(0.0, {turns: 10.0}))
    away = [top.missed(at_s, "Refused.") for at_s in (2.0, 5.0)]
    assert [(view.is_answering, view.is_ready, view.reason, view.silent_s) for view in away] == [
        (False, False, "Refused.", 2.0),
        (False, False, "Refused.", 5.0),
    ]
    # A restarted service counts from 0.
    view = top.take(Reading(10.0, {turns: 5.0}))
    assert (view.is_answering, view.turns_per_s, view.silent_s) == (True, 0.5, None)


def test_a_service_that_was_never_there_is_silent_since_the_first_look() -> None:
    top = Top(30)
    assert [top.missed(at_s, "Refused.").silent_s for at_s in (7.0, 9.0)] == [0.0, 2.0]


def test_policies_have_the_version_of_the_policy_route_and_the_age_only_of_that() -> None:
    named = [NamedPolicyState(name="run-b", current=4, next_version=5), NamedPolicyState(name="run-c", next_version=1)]
    policy = POLICY.model_copy(update={"current": 3, "named": named})
    values = {
        Series("rollout_policy_version", (("policy", ""), ("replica", "a"))): 2.0,
        Series("rollout_policy_version", (("policy", "run-b"), ("replica", "a"))): 4.0,
        Series("rollout_policy_age_seconds", (("policy", ""), ("replica", "a"))): 60.0,
        Series("rollout_policy_age_seconds", (("policy", "run-b"), ("replica", "a"))): 8.0,
        Series("rollout_policy_age_seconds", (("policy", "run-b"), ("replica", "b"))): 9.0,
    }
    assert Top(30).take(Reading(0.0, values, policy)).policies == [
        PolicyView(name="", version=3),
        PolicyView(name="run-b", version=4, age_s=9.0),
    ]


def test_the_mean_reward_counts_negative_rewards_and_is_unknown_without_rollouts() -> None:
    def reading(at_s: float, count: float, gained: float, lost: float) -> Reading:
        return Reading(
            at_s,
            {
                Series("rollout_rollouts_total", (("task_name", "math"),)): count,
                Series("rollout_reward_count", (("task_name", "math"),)): count,
                Series("rollout_reward_sums_total", (("sign", "positive"), ("task_name", "math"))): gained,
                Series("rollout_reward_sums_total", (("sign", "negative"), ("task_name", "math"))): lost,
            },
        )

    top = Top(30)
    assert top.take(reading(0, 0, 0, 0)).tasks == []
    assert top.take(reading(1, 0, 0, 0)).tasks == [TaskView(task_name="math", rollouts_per_s=0.0)]
    assert top.take(reading(2, 4, 3, 1)).tasks[0].mean_reward == 0.5


def test_the_share_of_clipped_responses_is_by_task_and_over_all_and_0_before_there_was_one() -> None:
    def reading(at_s: float, **clipped: float) -> Reading:
        turns = {Series("rollout_turns_total", (("task_name", name),)): 10 * at_s for name in ("code", "math")}
        cut = {Series("rollout_clipped_turns_total", (("task_name", name),)): count for name, count in clipped.items()}
        return Reading(at_s, turns | cut | {Series("rollout_rollouts_total", (("task_name", "math"),)): at_s})

    top = Top(30)
    assert top.take(reading(0)).clipped_ratio is None
    view = top.take(reading(1))
    assert (view.clipped_ratio, [task.clipped_ratio for task in view.tasks]) == (0.0, [0.0])
    view = top.take(reading(2, math=5, code=10))
    assert (view.clipped_ratio, [task.clipped_ratio for task in view.tasks]) == (0.375, [0.25])


def replica(deployment: str, replica_id: str) -> Series:
    return Series("serve_deployment_replica_healthy", (("deployment", deployment), ("replica", replica_id)))


def test_a_replica_counts_for_a_while_after_it_was_last_said_to_be_healthy() -> None:
    top = Top(30)
    both = {replica("math", "a"): 1.0, replica("math", "b"): 1.0}
    assert top.take(Reading(0.0, both)).replicas == {"math": 2}
    assert top.take(Reading(20.0, {replica("math", "a"): 1.0})).replicas == {"math": 2}
    assert top.take(Reading(31.0, {})).replicas == {"math": 1}
    assert top.take(Reading(32.0, {replica("math", "a"): 0.0})).replicas == {"math": 0}


def test_replicas_of_a_service_that_went_away_do_not_count() -> None:
    top = Top(30)
    top.take(Reading(0.0, {replica("math", "a"): 1.0}))
    top.missed(1.0, "Refused.")
    assert top.take(Reading(2.0, {replica("math", "b"): 1.0}, POLICY)).replicas == {"Generator": 1, "math": 1}


def test_tokens_are_those_of_rollouts_where_engines_say_nothing() -> None:
    def reading(at_s: float, tokens: float) -> Reading:
        return Reading(at_s, {Series("rollout_tokens_total", (("kind", "generated"), ("task_name", "math"))): tokens})

    top = Top(30)
    top.take(reading(0, 0))
    assert top.take(reading(2, 50)).tokens_per_s == 25.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.4, "0 s"),
        (45.2, "45 s"),
        (200.0, "3 min 20 s"),
        (7500.0, "2 h 5 min"),
        (7205.0, "2 h"),
        (349200.0, "4 d 1 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


def test_figures_have_few_digits() -> None:
    assert [rate_text(value) for value in (None, 0.0, 1.234, 12.34, 1234.5)] == ["-", "0.00", "1.23", "12.3", "1,234"]
    assert [percent_text(value) for value in (None, 0.0, 0.0012, 0.5)] == ["-", "0%", "0.1%", "50%"]
