"""A taskset of verifiers whose own environment answers over several turns."""

import itertools

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        turns = 1
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.secret):
                turns += 1
                guess = int(segment.last_reply) if segment.last_reply.isdecimal() else 0
                segment = await interaction.turn("Higher." if guess < task.data.secret else "Lower.")
        interaction.trace.record_reward("found", 1.0 / turns, 1.0)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield GuessTask(GuessData(prompt="Guess my number.", secret=number), self.config.task)
