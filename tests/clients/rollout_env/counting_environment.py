"""An environment without fault, and one fault at a time for tests of what is said about it."""

from typing import Any, ClassVar

from pydantic import BaseModel

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment


class Count(BaseModel):
    until: int
    count: int = 0


class CountingEnvironment(TaskEnvironment):
    """Terminates after `until` steps. Each gives a reward of 1 for a reply with the number of the step, else 0."""

    description: ClassVar[str] = "Count."
    ExtraEnvInfo: ClassVar[type[BaseModel]] = Count

    async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
        count = extra_env_info.count + 1
        reply = message_log[-1]["content"]
        return StepOutcome(
            observation={"role": "user", "content": f"That was {count}."},
            reward=float(reply == str(count)),
            terminated=count == extra_env_info.until,
            metadata={"until": extra_env_info.until, "count": count},
            answer=reply or None,
        )

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [counting_sample(until) for until in range(seed + 2, seed + 2 + count)]


def counting_sample(until: int, **fields: Any) -> dict[str, Any]:
    prompt = {"role": "user", "content": f"Count to {until}."}
    return {"messages": [prompt], "extra_env_info": {"until": until}, **fields}
