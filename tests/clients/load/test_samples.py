"""What a load test posts comes from the service."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from rollout_load.options import LoadOptions
from rollout_load.samples import NoSamples, SamplePool
from tests.clients.scripted_service import ScriptedService

OPTIONS = LoadOptions()


def test_samples_are_of_all_tasks_of_the_service(service: ScriptedService) -> None:
    pool = SamplePool()
    pool.fill(service.url, OPTIONS)
    assert [sample["task_name"] for sample in [*pool.some(3), pool.long()]] == ["math"] * 4
    assert pool.some(1)[0]["messages"] == [{"role": "user", "content": "What is 1 + 1?"}]


def test_a_task_that_the_service_does_not_have_is_named(service: ScriptedService) -> None:
    for options in (replace(OPTIONS, tasks=("maths",)), replace(OPTIONS, long_tasks=("maths",))):
        with pytest.raises(NoSamples, match=r"The service has no task maths; it has math\."):
            SamplePool().fill(service.url, options)


def test_without_a_service_there_are_no_samples() -> None:
    with (
        patch("rollout_load.samples.RETRIES", 0),
        pytest.raises(NoSamples, match=r"http://127\.0\.0\.1:9 cannot be reached"),
    ):
        SamplePool().fill("http://127.0.0.1:9", OPTIONS)
