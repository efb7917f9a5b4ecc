"""A taskset of verifiers with one turn a task."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    total: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.total))

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)

    @vf.reward(weight=0.5)
    async def fragile(self, trace: vf.Trace) -> float:
        if trace.last_reply == "break":
            raise ValueError("the verifier broke")
        return 0.0


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(5):
            data = SumData(prompt=f"What is {number} + 1?", system_prompt="Answer with a number.", total=number + 1)
            yield SumTask(data, self.config.task)
