"""Samples that the service takes from a task: pages of them, and requests that ask for them."""

import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from deployments.data.rows import DataReader, DataRefused
from deployments.failures import DataLost
from rollout_client import AsyncRolloutClient
from rollout_client.contract.rollouts import RolloutResponse
from rollout_client.contract.selection import SampleRange
from service.rollout_requests.task_samples import TaskSampler
from service.settings import AdmissionSettings
from tests.service.scripted import ScriptedEnvironment, outcome
from tests.service.scripted_http import LIMITS, ScriptedHttp

ROWS = 10


def row(place: int) -> dict[str, Any]:
    return {"id": str(place % ROWS), "task_name": "math", "messages": [{"role": "user", "content": "\u2028\n" * place}]}


class ScriptedData(DataReader):
    """Ten rows of the task math. Its parts end within lines."""

    async def sizes(self) -> dict[str, dict[str, int]]:
        return {"math": {"train": ROWS}}

    async def revision(self, wanted: SampleRange) -> str:
        if wanted.split is not None:
            raise DataRefused("task 'math' has no such split", "split", wanted.split)
        return f"revision of seed {wanted.seed}"

    async def samples(self, wanted: SampleRange, most_bytes: int) -> AsyncGenerator[bytes, None]:
        if wanted.split == "lost":
            raise DataLost("The data are lost.")
        if wanted.split is not None:
            raise DataRefused("task 'math' has no such split", "split", wanted.split)
        rows = [row(place) for place in range(wanted.start, wanted.start + wanted.count)]
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if len(lines) > most_bytes:
            lines = lines[: lines.index(b"\n") + 1]
        for begin in range(0, len(lines), 7):
            yield lines[begin : begin + 7]


class Games(ScriptedEnvironment):
    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{**sample, "task_name": "sliding_puzzle"} for sample in await super().example_samples(count, seed)]


def service(**options: Any) -> ScriptedHttp:
    """Its task math has data, sliding_puzzle has none."""
    http = ScriptedHttp(**options)
    http.environments["sliding_puzzle"] = Games([outcome(terminated=True)])
    http.rollouts.task_sampler = TaskSampler(http.environments, ScriptedData(), {"math"})
    return http


def ids(response: RolloutResponse) -> list[str | None]:
    return [sample.id for sample in response.samples]


def test_a_page_has_the_samples_of_the_data_and_where_the_next_one_begins() -> None:
    page = service().call(lambda client: client.task_samples("math", 3, 8))
    assert [sample.id for sample in page.samples] == ["8", "9", "0"]
    assert page.samples[2].messages is not None
    assert page.samples[2].messages[0].content == "\u2028\n" * 10
    assert page.next_start == 11


def test_a_page_of_a_benchmark_says_how_many_samples_there_are() -> None:
    http = service()
    counts = []
    for count in (None, 3):
        http.environments |= {
            task: Games([outcome(terminated=True)], sample_count=count) for task in ("sliding_puzzle", "math")
        }
        http.rollouts.task_sampler = TaskSampler(http.environments, ScriptedData(), {"math"})
        pages = [http.request("GET", f"/tasks/{task}/samples?count=1").json() for task in ("sliding_puzzle", "math")]
        counts.append([page.get("sample_count") for page in pages])
    assert counts == [[None, None], [3, None]]


def test_the_tasks_say_which_splits_their_data_have() -> None:
    assert [task.splits for task in service().call(lambda client: client.tasks())] == [{"train": ROWS}, {}]


def test_a_page_ends_where_the_bytes_end_that_a_response_may_take() -> None:
    page = service().call(lambda client: client.task_samples("math", 100))
    assert (len(page.samples), page.next_start) == (1, 1)


def test_a_request_plays_ranges_in_order_and_names_the_next_ones() -> None:
    async def play(client: AsyncRolloutClient) -> RolloutResponse:
        games = {"task_name": "sliding_puzzle", "count": 1, "seed": 3}
        return await client.rollout(
            samples_from=[SampleRange(task_name="math", start=8, count=3), games], num_generations=2
        )

    response = service().call(play)
    assert ids(response) == ["8", "8", "9", "9", "0", "0", None, None]
    assert [sample.task_name for sample in response.samples] == ["math"] * 6 + ["sliding_puzzle"] * 2
    assert [drawn.model_dump(exclude_unset=True) for drawn in response.next_samples_from] == [
        {"task_name": "math", "start": 11, "count": 3},
        {"task_name": "sliding_puzzle", "start": 1, "count": 1, "seed": 3},
    ]


@pytest.mark.parametrize("task_name", ["math", "sliding_puzzle"])
def test_a_range_of_another_revision_is_refused_before_anything_is_played(task_name: str) -> None:
    http = service()
    games = {"task_name": "sliding_puzzle", "count": 1}
    refused = http.post({"samples_from": [games, {"task_name": task_name, "count": 1, "revision": "other"}]})
    [error] = refused.json()["errors"]
    assert (refused.status_code, error["field"], error["value"]) == (422, "samples_from[1].revision", "other")
    assert error["message"].startswith(f"the data of task '{task_name}', or their settings, are not those that this")
    assert not http.has_started_something


def test_ranges_can_be_streamed() -> None:
    async def stream(client: AsyncRolloutClient) -> tuple[list[str], int]:
        async with client.stream(samples_from=[SampleRange(task_name="math", count=2)], num_generations=2) as rollouts:
            names = sorted([str(sample.id) async for sample in rollouts])
        return names, rollouts.summary.next_samples_from[0].start

    assert service().call(stream) == (["0", "0", "1", "1"], 2)


def test_samples_of_an_environment_depend_on_the_start_alone() -> None:
    def texts(start: int) -> list[Any]:
        page = service().call(lambda client: client.task_samples("sliding_puzzle", 2, start))
        return [sample.messages and sample.messages[0].content for sample in page.samples]

    assert texts(0) == ["0-0", "0-1"]
    assert texts(2) == texts(2)
    assert len({*texts(0), *texts(2), *texts(4)}) == 6


@pytest.mark.parametrize(
    ("options", "status", "field", "says"),
    [
        ({"split": "eval"}, 422, "samples_from[0].split", "task 'math' has no such split"),
        ({"split": "lost"}, 503, "", "The data are lost."),
        ({"count": 100}, 422, "samples_from[0].count", f"take more than {LIMITS.max_body_bytes} bytes; ask for fewer"),
    ],
)
def test_data_without_the_samples_refuse_a_request(options: dict[str, Any], status: int, field: str, says: str) -> None:
    http = service()
    response = http.post({"samples_from": [{"task_name": "math", "count": 1, **options}]})
    document = response.json()
    assert (response.status_code, document["errors"][0]["field"]) == (status, field)
    assert says in document["detail"]
    assert not http.has_started_something


@dataclass
class OtherGames(Games):
    """Makes another number of samples than it was asked for, or longer ones."""

    makes: Callable[[int], int] = int
    id_length: int = 1

    async def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        samples = await super().example_samples(self.makes(count), seed)
        return [{**sample, "id": "x" * self.id_length} for sample in samples]


@pytest.mark.parametrize(
    ("makes", "id_length", "count", "on_page", "refused"),
    [
        (lambda _: 3, 1, 4, 3, "the environment of task 'sliding_puzzle' makes only 3 samples; ask for fewer."),
        (int, LIMITS.max_body_bytes // 3, 4, 2, f"take more than {LIMITS.max_body_bytes} bytes; ask for fewer."),
        (lambda count: count + 1, 1, 2, 2, None),
    ],
)
def test_an_environment_makes_too_few_too_long_or_too_many_samples(
    makes: Callable[[int], int], id_length: int, count: int, on_page: int, refused: str | None
) -> None:
    http = service()
    http.environments["sliding_puzzle"] = OtherGames([outcome(terminated=True)], makes=makes, id_length=id_length)
    page = http.call(lambda client: client.task_samples("sliding_puzzle", count))
    assert (len(page.samples), page.next_start) == (on_page, on_page)
    response = http.post({"samples_from": [{"task_name": "sliding_puzzle", "count": count}]})
    assert response.status_code == (200 if refused is None else 422)
    if refused is not None:
        assert response.json()["detail"].startswith("samples_from[0].count: ")
        assert response.json()["detail"].endswith(refused)


def test_the_samples_count_for_admission_like_those_of_a_body() -> None:
    http = service(admission=AdmissionSettings(max_body_bytes=100))
    assert http.post({"samples_from": [{"task_name": "math", "count": 4}]}).status_code == 413
