"""A real OpenEnv server, by the package: its environment counts. Runs where the package is installed."""

import os
import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class CountAction(Action):
    word: str
    times: int = 1


class CountObservation(Observation):
    text: str


class CountEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, goal=3):  # noqa: ARG002
        self.count, self.goal = 0, goal
        return CountObservation(text=f"seed {seed if 'unseeded' not in sys.argv else random.random()}")

    def step(self, action, timeout_s=None):  # noqa: ARG002
        match action.word:
            case "raise":
                raise ValueError("the word is raise")
            case "die":
                os._exit(1)
        self.count += action.times
        done = self.count >= self.goal
        return CountObservation(text=f"{action.word} {self.count}", reward=0.5 * action.times, done=done)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=4)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
