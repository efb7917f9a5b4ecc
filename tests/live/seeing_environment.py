"""An environment of several turns that shows pictures."""

from typing import Any

from pydantic import BaseModel

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment
from tests.vision_model import picture

TURNS = 4


class Seen(BaseModel):
    seed: int = 0
    turn: int = 0


class SeeingEnvironment(TaskEnvironment):
    """Shows with each observation a new picture, after the one before, and rewards each turn with 1."""

    description = "Shows pictures."
    ExtraEnvInfo = Seen

    async def step(self, message_log: list[ChatMessage], extra_env_info: Seen) -> StepOutcome:
        turn, seed = extra_env_info.turn, extra_env_info.seed
        images: list[Any] = [picture(64, 64, seed + place) for place in range(max(turn - 1, 0), turn + 1)]
        return StepOutcome(
            {"role": "user", "content": f"Turn {turn}", "images": images},
            1.0,
            terminated=turn + 1 == TURNS,
            metadata=Seen(seed=seed, turn=turn + 1).model_dump(),
            answer=str(sum(len(message.get("images", ())) for message in message_log)),
        )

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [
            {"messages": [{"role": "user", "content": "Look."}], "extra_env_info": {"seed": 10 * (seed + place)}}
            for place in range(count)
        ]
