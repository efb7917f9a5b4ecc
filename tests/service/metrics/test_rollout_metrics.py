"""What rollouts add to the metrics, with Ray's instruments replaced by ones that remember what they were given."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from deployments.failures import GenerationLost
from rollout_env import StepOutcome
from service.admission.capacity import Amounts
from service.metrics.ingress_metrics import IngressGauges
from service.metrics.rollout_metrics import RolloutMetrics
from service.scheduling.fair_queue import _weight_of
from tests.service.rollouts.playing import async_context, collect
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, ScriptedGenerator, outcome

Given = dict[tuple[str, str], list[float]]
"""By the name of a metric and its tags."""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    values: Given = {}

    class Instrument:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = ()) -> None:
            assert description.endswith(".")

            self._name = name
            self._keys = set(tag_keys)

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            tags = tags or {}
            assert set(tags) == self._keys
            values.setdefault((self._name, ",".join(tags.values())), []).append(value)

        inc = set

    monkeypatch.setattr("ray.serve.metrics.Counter", Instrument)
    monkeypatch.setattr("ray.serve.metrics.Gauge", Instrument)
    monkeypatch.setattr("service.metrics.ingress_metrics.Gauge", Instrument)
    return values


def flushed(metrics: RolloutMetrics, given: Given) -> Given:
    """What Ray was given, without the buckets of histograms."""
    for instrument in metrics.instruments:
        instrument.flush(repeats=True)
    return {key: found for key, found in given.items() if not key[0].endswith("_bucket")}


def test_a_played_rollout_counts_its_calls_and_failures_by_task(given: Given) -> None:
    metrics = RolloutMetrics()
    generator = ScriptedGenerator(["A", GenerationLost("The replica died."), "B"])
    environment = ScriptedEnvironment([outcome("O", 0.5), outcome("O", 1.0, terminated=True)])
    context = replace(async_context(generator, environment), observer=metrics)
    [episode] = [EpisodeRecipe(retries=1).make()]
    results = collect([episode], context)
    assert results[0].status == "completed"
    metrics.ended(results[0], staleness=2)
    found = flushed(metrics, given)
    task = episode.identity.task_name
    stages = {tags: counts for (name, tags), counts in found.items() if name == "rollout_stage_seconds_count"}
    assert stages == {f"{task},rollout": [1], f"{task},turn": [2], f"{task},generate": [2], f"{task},step": [2]}
    assert {key: values for key, values in found.items() if not key[0].startswith("rollout_stage_seconds")} == {
        ("rollout_failed_calls_total", f"{task},generate,generation"): [1],
        ("rollout_rollouts_total", f"{task},completed"): [1],
        ("rollout_turns_total", task): [2],
        ("rollout_tokens_total", f"{task},generated"): [2],
        ("rollout_tokens_total", f"{task},environment"): [results[0].metrics.env_tokens],
        ("rollout_reward_count", task): [1],
        ("rollout_reward_sum", task): [1.5],
        ("rollout_reward_sums_total", f"{task},positive"): [1.5],
        ("rollout_staleness_versions_count", task): [1],
        ("rollout_staleness_versions_sum", task): [2],
    }


def counted(given: Given, texts: list[str | Exception], *outcomes: StepOutcome, **recipe: Any) -> Given:
    """What a rollout with these responses and outcomes adds to the metrics by its end."""
    context, metrics = async_context(ScriptedGenerator(texts), ScriptedEnvironment(outcomes)), RolloutMetrics()
    metrics.ended(collect([EpisodeRecipe(**recipe).make()], context)[0], staleness=None)
    return flushed(metrics, given)


def test_turns_whose_response_was_cut_by_its_length_are_counted_by_task(given: Given) -> None:
    found = counted(given, ["ABC", "A"], outcome("O"), outcome("O", 1.0, terminated=True), max_new_tokens=2)
    assert [found[name, "task"] for name in ("rollout_turns_total", "rollout_clipped_turns_total")] == [[2], [1]]


def test_a_negative_reward_is_summed_without_its_sign(given: Given) -> None:
    counts = counted(given, ["A"], outcome("O", -2.5, terminated=True))
    assert {key: found for key, found in counts.items() if "reward" in key[0]} == {
        ("rollout_reward_count", "task"): [1],
        ("rollout_reward_sum", "task"): [0.0],
        ("rollout_reward_sums_total", "task,negative"): [2.5],
    }


def test_generated_tokens_are_counted_by_priority(given: Given) -> None:
    metrics = RolloutMetrics()
    for weight, tokens in ((1.0, 5), (1 / 16, 7), (1.0, 2), (2.5, 3)):
        metrics.generated(weight, tokens)
    assert {key: found for key, found in flushed(metrics, given).items() if "priority" in key[0]} == {
        ("rollout_generated_tokens_by_priority_total", "train"): [7],
        ("rollout_generated_tokens_by_priority_total", "batch"): [7],
        ("rollout_generated_tokens_by_priority_total", "other"): [3],
    }


def gauges_of(
    waiting: Mapping[float, int] = MappingProxyType({}),
    versions: Mapping[str, int] = MappingProxyType({}),
    kind: type[IngressGauges] = IngressGauges,
    programs: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> IngressGauges:
    """Gauges of a replica with so many waiting generations by weight, and versions by policy."""
    admission: Any = SimpleNamespace(in_flight=Amounts())
    generator: Any = SimpleNamespace(waiting_generations=sum(waiting.values()), waiting_by_weight=waiting)
    generator.programs = lambda: programs
    policy: Any = SimpleNamespace(known_versions=versions)
    return kind(admission, generator, policy)


def test_the_age_of_a_version_begins_when_it_is_first_seen(given: Given) -> None:
    versions: dict[str, int] = {}
    gauges = gauges_of(versions=versions)
    for now_s, version in ((10.0, 1), (15.0, 1), (20.0, 2), (27.0, 2)):
        versions[""] = version
        gauges.set(now_s)
    assert given["rollout_policy_age_seconds", ""] == [0.0, 5.0, 0.0, 7.0]
    assert given["rollout_policy_version", ""] == [1, 1, 2, 2]


def test_kept_and_parked_programs_and_recomputed_tokens_are_told_by_generator(given: Given) -> None:
    gauges_of(programs={"g1": (3, 0), "g2": (0, 5)}).set(1.0)
    metrics = RolloutMetrics()
    for generator, tokens in (("g1", 16), ("g2", 32), ("g1", 64)):
        metrics.recomputed(generator, tokens)
    assert {key: found for key, found in {**given, **flushed(metrics, given)}.items() if key[1] in ("g1", "g2")} == {
        ("rollout_kept_programs", "g1"): [3],
        ("rollout_kept_programs", "g2"): [0],
        ("rollout_parked_programs", "g1"): [0],
        ("rollout_parked_programs", "g2"): [5],
        ("rollout_recomputed_tokens_total", "g1"): [80],
        ("rollout_recomputed_tokens_total", "g2"): [32],
    }


def test_each_look_shows_the_queue_of_every_priority(given: Given) -> None:
    waiting = {_weight_of("train"): 3}
    gauges = gauges_of(waiting)
    gauges.set(1.0)
    waiting.clear()
    gauges.set(2.0)
    assert given["rollout_waiting_by_priority", "train"] == [3, 0]
    assert given["rollout_waiting_by_priority", "batch"] == [0, 0]


async def test_gauges_are_set_before_rays_exporter_forgets_them(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    shortest_interval_s = 1.0
    looked_at: list[float] = []

    class NotedGauges(IngressGauges):
        def set(self, now_s: float) -> None:
            looked_at.append(now_s)
            super().set(now_s)

    monkeypatch.setattr("service.metrics.ingress_metrics.monotonic", asyncio.get_running_loop().time)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gauges_of(kind=NotedGauges).export(), 60.0)
    assert max(later - before for before, later in pairwise(looked_at)) < 2 * shortest_interval_s
    assert len(given["rollout_in_flight", ""]) == len(looked_at)
