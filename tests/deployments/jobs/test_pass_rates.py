"""Pass rates by sample and version."""

from hypothesis import given
from hypothesis import strategies as st

from deployments.jobs.pass_rates import VERSIONS_OF_A_SAMPLE, PassRates, RewardNote, SampleKey


def key(name: str, policy: str | None = None) -> SampleKey:
    return SampleKey(policy, "math", name)


def test_the_rate_of_a_sample_is_the_mean_reward_under_the_versions_that_count() -> None:
    rates = PassRates()
    rates.note([RewardNote(key("a"), version, reward) for version, reward in [(1, 1.0), (2, 0.0), (2, 0.0), (3, 1.0)]])
    assert [rates.rates([key("a")], since) for since in (0, 2, 3, 4)] == [[0.5], [1 / 3], [1.0], [None]]


def test_samples_of_other_policies_and_tasks_are_others() -> None:
    rates = PassRates()
    rates.note([RewardNote(key("a", "run-b"), 1, 1.0)])
    assert rates.rates([key("a"), key("a", "run-b"), SampleKey("run-b", "code", "a")], 0) == [None, 1.0, None]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9), st.sampled_from([0.0, 1.0])), max_size=60))
def test_the_samples_noted_last_are_remembered_under_their_latest_versions(
    notes: list[tuple[str, int, float]],
) -> None:
    rates = PassRates(most_samples=3)
    for name, version, reward in notes:
        rates.note([RewardNote(key(name), version, reward)])
    latest = list(dict.fromkeys(name for name, _, _ in reversed(notes)))[:3]
    known = rates.rates([key(name) for name in "abcdef"], 0)
    assert {name for name, rate in zip("abcdef", known, strict=True) if rate is not None} == set(latest)
    assert all(len(rewards) <= VERSIONS_OF_A_SAMPLE for rewards in rates._rewards.values())
