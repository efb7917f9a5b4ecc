"""Several expositions in Prometheus' text format, merged into one."""

from service.metrics.ingress_metrics import _merged

ONE = """\
# HELP ray_rollout_turns Turns of a rollout.
# TYPE ray_rollout_turns histogram
ray_rollout_turns_bucket{node="1",le="+Inf"} 3.0
ray_rollout_turns_count{node="1"} 3.0
# HELP ray_node_cpu Processors.
# TYPE ray_node_cpu gauge
ray_node_cpu{node="1"} 8.0
# HELP ray_rollout_in_flight Rollouts in flight.
# TYPE ray_rollout_in_flight gauge
ray_rollout_in_flight{node="1"} 4.0
"""
OTHER = ONE.replace('node="1"', 'node="2"').replace("} 4.0", "} 5.0")


def test_the_samples_of_all_nodes_stand_together_below_one_heading() -> None:
    assert (
        _merged([ONE, OTHER], ("ray_rollout_",))
        == """\
# HELP ray_rollout_in_flight Rollouts in flight.
# TYPE ray_rollout_in_flight gauge
ray_rollout_in_flight{node="1"} 4.0
ray_rollout_in_flight{node="2"} 5.0
# HELP ray_rollout_turns Turns of a rollout.
# TYPE ray_rollout_turns histogram
ray_rollout_turns_bucket{node="1",le="+Inf"} 3.0
ray_rollout_turns_count{node="1"} 3.0
ray_rollout_turns_bucket{node="2",le="+Inf"} 3.0
ray_rollout_turns_count{node="2"} 3.0
"""
    )


def test_a_metric_whose_heading_differs_between_nodes_keeps_the_first() -> None:
    assert _merged([ONE, OTHER.replace("Rollouts in flight.", "Rollouts.")], ("ray_rollout_in",)).splitlines()[:2] == [
        "# HELP ray_rollout_in_flight Rollouts in flight.",
        "# TYPE ray_rollout_in_flight gauge",
    ]
