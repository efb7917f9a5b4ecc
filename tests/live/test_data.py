"""Samples that the running service takes from the data of a task."""

import json
from pathlib import Path

from typer.testing import CliRunner

from rollout_client import RolloutClient
from rollout_client.cli.app import app


def test_a_request_plays_the_samples_that_the_pages_show(client: RolloutClient) -> None:
    [task] = [task for task in client.tasks() if task.task_name == "following"]
    assert task.splits == {"train": 8, "validation": 2}
    first = client.task_samples("following", 5, seed=3)
    rest = client.task_samples("following", 3, first.next_start, seed=3)
    assert len({sample.id for sample in [*first.samples, *rest.samples]}) == 8
    wanted = {"task_name": "following", "count": 8, "seed": 3}
    played = client.rollout(samples_from=[wanted], num_generations=2, sampling={"max_new_tokens": 1})
    shown = [sample for sample in [*first.samples, *rest.samples] for _ in range(2)]
    assert [sample.id for sample in played.samples] == [sample.id for sample in shown]
    rewards = [float(sample.messages[0].content) for sample in shown if sample.messages]  # type: ignore[arg-type]
    assert [sample.total_reward for sample in played.samples] == rewards
    [following] = played.next_samples_from
    assert following.start == 8


def test_groups_are_selected_of_the_data_in_their_order_through_all_epochs(client: RolloutClient) -> None:
    page = client.task_samples("following", 8, seed=3)
    rewards = {sample.id: float(sample.messages[0].content) for sample in page.samples if sample.messages}  # type: ignore[arg-type]
    least = sorted(rewards.values())[4]
    passing = [sample.id for sample in page.samples if rewards[sample.id] >= least]
    wanted = [{"task_name": "following", "count": 2, "seed": 3}]
    keep = {"groups": len(passing), "where": {"reward_mean": {"ge": least}}}
    played = client.rollout(samples_from=wanted, num_generations=2, sampling={"max_new_tokens": 1}, keep=keep)
    assert [sample.id for sample in played.samples] == [name for name in passing for _ in range(2)]
    assert played.groups is not None
    drawn = page.samples.index(next(sample for sample in page.samples if sample.id == passing[-1])) + 1
    assert (played.groups.drawn, played.groups.kept) == (drawn, len(passing))
    assert played.groups.dropped == ({"reward_mean.ge": drawn - len(passing)} if drawn > len(passing) else {})
    [following] = played.next_samples_from
    assert (following.start, following.count) == (drawn, 2)


def test_a_job_is_exported_as_rows_of_tokens(client: RolloutClient, service_url: str, tmp_path: Path) -> None:
    samples = client.example_samples("math", count=2)
    job = client.jobs.submit(samples, num_generations=2, sampling={"max_new_tokens": 4, "ignore_eos": True})
    output = tmp_path / "rows.jsonl"
    to_export = ["export", "--job", job.job_id, "--format", "tokens", "--output", str(output), "--url", service_url]
    done = CliRunner().invoke(app, [*to_export, "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 4
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [sum(label != -100 for label in row["labels"]) for row in rows] == [4] * 4
