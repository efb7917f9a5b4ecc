"""A task whose environment shows a picture at each step, for tests of the whole service."""

from io import BytesIO
from typing import Any

from PIL import Image
from pydantic import BaseModel

from rollout_env import ChatMessage, StepOutcome, TaskEnvironment

SIDE = 64


class Painting(BaseModel):
    """What is painted."""

    colors: list[str]


def painted(color: str) -> bytes:
    file = BytesIO()
    Image.new("RGB", (SIDE, SIDE), color).save(file, "PNG")
    return file.getvalue()


class PaintingEnvironment(TaskEnvironment):
    """Shows a picture of each color, and ends the rollout."""

    description = "Shows pictures."
    ExtraEnvInfo = Painting

    async def step(self, message_log: list[ChatMessage], extra_env_info: Painting) -> StepOutcome:
        images: list[bytes | str] = [painted(color) for color in extra_env_info.colors]
        return StepOutcome({"role": "user", "content": "look", "images": images}, 1.0, terminated=True)

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": "Show me something."}]
        return [{"messages": messages, "extra_env_info": {"colors": ["red"]}} for _ in range(count)]
