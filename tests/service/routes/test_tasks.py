"""`/tasks` lists the environments, and makes samples of them."""

import pytest

from tests.service.scripted_http import ScriptedHttp


def sample(text: str) -> dict[str, object]:
    return {"task_name": "task", "messages": [{"role": "user", "content": text}]}


def test_every_environment_is_listed_with_an_example() -> None:
    response = ScriptedHttp().request("GET", "/tasks")
    task = {"task_name": "task", "description": "A scripted task.", "fields": {}, "tools": [], "example": sample("0-0")}
    assert (response.status_code, response.json()) == (200, {"tasks": [task, task]})


@pytest.mark.parametrize(
    ("query", "texts"), [("?count=2&seed=7", ["7-0", "7-1"]), ("?count=1", ["0-0"]), ("", [f"0-{n}" for n in range(8)])]
)
def test_samples_of_a_task_are_made_by_its_environment(query: str, texts: list[str]) -> None:
    response = ScriptedHttp().request("GET", f"/tasks/math/samples{query}")
    page = {"samples": [sample(text) for text in texts], "next_start": len(texts)}
    assert (response.status_code, response.json()) == (200, page)
