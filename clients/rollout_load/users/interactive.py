"""Somebody who tries one prompt: one rollout, of few turns, before everything else."""

from locust import task

from rollout_load.users.base import POOL, FastLoadUser


class Interactive(FastLoadUser):
    kind = "interactive"

    @task
    def one(self) -> None:
        self.roll_out(self.body(POOL.some(1), 1, self.options.max_turns, "interactive"))
