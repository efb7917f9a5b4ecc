"""Samples that the running service takes from the data of a task."""

import pytest

from rollout_client import RequestRejected, RolloutClient


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


def test_a_split_that_the_data_do_not_have_is_refused(client: RolloutClient) -> None:
    with pytest.raises(RequestRejected, match="no split 'test'; it has train, validation"):
        client.rollout(samples_from=[{"task_name": "following", "count": 1, "split": "test"}])
