"""A long conversation with an environment: one rollout of many turns, whose prefix grows."""

from locust import task

from rollout_load.users.base import POOL, FastLoadUser


class MultiTurn(FastLoadUser):
    kind = "multi-turn"

    @task
    def conversation(self) -> None:
        self.roll_out(self.body([POOL.long()], 1, self.options.long_turns, "train"))
