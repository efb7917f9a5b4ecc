"""What is read of a page of metrics."""

import pytest

from rollout_client.cli.top.metrics import Series, values_of
from tests.clients.cli.top.recorded import FIRST, GENERATOR


def test_the_recorded_page_has_the_series_that_are_shown() -> None:
    values = values_of(FIRST)
    found = {series.name for series in values}
    assert found == {
        "rollout_in_flight",
        "rollout_policy_age_seconds",
        "rollout_policy_version",
        "rollout_reward_count",
        "rollout_reward_sums_total",
        "rollout_rollouts_total",
        "rollout_tokens_total",
        "rollout_turns_total",
        "rollout_waiting_generations",
        "serve_deployment_replica_healthy",
        "vllm_generation_tokens_total",
        "vllm_kv_cache_usage_perc",
        "vllm_num_requests_running",
        "vllm_num_requests_waiting",
        "vllm_prefix_cache_hits_total",
        "vllm_prefix_cache_queries_total",
    }
    [tokens] = [series for series in values if series.name == "vllm_generation_tokens_total"]
    assert (tokens.label("ReplicaId"), tokens.label("none"), values[tokens]) == (GENERATOR, "", 41181.0)


def test_what_is_not_shown_is_not_parsed() -> None:
    page = '# TYPE ray_other counter\nray_other{ no format\nother 1\n\nray_rollout_in_flight{replica="a\\"b"} 3\n'
    assert values_of(page) == {Series("rollout_in_flight", (("replica", 'a"b'),)): 3.0}


@pytest.mark.parametrize("page", ["", "<html>A portal</html>"])
def test_a_page_without_metrics_has_none(page: str) -> None:
    assert values_of(page) == {}


def test_a_line_that_is_cut_off_raises() -> None:
    with pytest.raises(ValueError, match="could not convert string to float"):
        values_of('ray_rollout_in_flight{replica="a"')
