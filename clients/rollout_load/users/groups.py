"""A trainer of GRPO: batches of samples, a group of rollouts of each, the whole answer at once."""

from locust import task

from rollout_load.users.base import POOL, FastLoadUser


class GroupBatch(FastLoadUser):
    kind = "groups"

    @task
    def batch(self) -> None:
        options = self.options
        self.roll_out(self.body(POOL.some(options.batch_samples), options.group_size, options.max_turns, "train"))
