"""Images of observations: kept where the environment runs, and named in what leaves it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from deployments.environments.step_runner import StepRunner
from deployments.failures import (
    EnvironmentBroken,
    ImagesLost,
    Overloaded,
    RestartableSessionLost,
    RolloutFailure,
    SessionLost,
)
from deployments.images.book import ImagesSettings
from deployments.images.checks import NOT_TAKEN, ObservedImages
from deployments.protocols.environments import StepRequest
from deployments.protocols.images import name_of_image
from rollout_env import ChatMessage, LostSession, Session, StartOutcome, StepOutcome
from tests import virtual_time
from tests.deployments.images.pictures import animation, picture
from tests.fakes.environment import StepsAlone
from tests.fakes.image_store import ImagesInProcess
from tests.fakes.storage import ScriptedStorage

pytestmark = pytest.mark.true_clock

RED, BLUE = picture("red"), picture("blue")
OTHERS = name_of_image(b"another key's")


def shown(*images: bytes | str, text: str = "look") -> ChatMessage:
    return {"role": "user", "content": text, "images": list(images)}


async def kept(outcome: StepOutcome, images: ImagesInProcess | None = None, **settings: Any) -> StepOutcome:
    return await ObservedImages(images or ImagesInProcess(), ImagesSettings(**settings)).kept(outcome, "ann")


async def test_bytes_are_put_once_for_the_owner_and_named_in_their_places() -> None:
    images = ImagesInProcess()
    await images.put([BLUE], "ann")
    said: ChatMessage = {"role": "tool", "content": "no picture"}
    red, blue = name_of_image(RED), name_of_image(BLUE)
    outcome = await kept(StepOutcome([shown(RED, BLUE, RED), said, shown(blue)], 1.0, False), images)
    assert outcome == StepOutcome([shown(red, blue, red), said, shown(blue)], 1.0, False)
    assert images.puts[1:] == [[red]], "what the store has is not put again"
    assert (await kept(StepOutcome(shown(RED), 0.0, True))).observation == shown(red), "one message stays one"


@pytest.mark.parametrize(
    ("images", "says"),
    [
        ([b"GIF89a"], "an image of 6 bytes: it is not PNG or JPEG"),
        ([RED, animation("PNG")], "it is animated; send one picture"),
        (["red.png"], r"'red\.png': there is no such image: it is not kept any more, or it is another key's; send its"),
        ([OTHERS], f"'{OTHERS}': there is no such image"),
        ([RED] * 5, r"it shows 5 images, and images\.max_images allows 4"),
    ],
)
async def test_what_cannot_be_shown_breaks_the_step_and_nothing_is_kept(images: list[bytes | str], says: str) -> None:
    store = ImagesInProcess()
    with pytest.raises(EnvironmentBroken, match=f"^The environment's observation cannot be shown: .*{says}"):
        await kept(StepOutcome(shown(*images), 0.0, False), store, max_images=4)
    assert store.puts == []


@virtual_time.synchronous
async def test_without_room_the_step_can_be_made_again() -> None:
    full = ImagesInProcess(ImagesSettings(max_bytes=10))
    with pytest.raises(Overloaded, match=r"^The images of an observation have no room: 0 bytes are kept"):
        await kept(StepOutcome(shown(RED), 0.0, False), full)
    storage = ScriptedStorage()
    storage.is_failing = True
    with pytest.raises(ImagesLost, match="try again later"):
        await kept(StepOutcome(shown(RED), 0.0, False), ImagesInProcess(storage=storage))


class Nothing(BaseModel):
    """No state."""


class Painter(StepsAlone):
    """Shows what it is asked for."""

    ExtraEnvInfo = Nothing

    async def start(self, message_log: list[ChatMessage], extra_env_info: Any) -> StartOutcome:
        return StartOutcome(shown(BLUE))

    async def step(self, message_log: list[ChatMessage], extra_env_info: Any) -> StepOutcome:
        return StepOutcome(shown(RED), 0.0, False)


async def results(images: ImagesInProcess | None) -> list[StepOutcome | RolloutFailure]:
    observed = None if images is None else ObservedImages(images, ImagesSettings())
    runner = StepRunner(Painter(), "painter", 60, observed)
    requests = (StepRequest([], {}, step_id="a", owner="ann", is_start=is_start) for is_start in (True, False))
    return list(await asyncio.gather(*(runner.start(request, set()) for request in requests)))


async def test_what_leaves_a_replica_has_names_alone() -> None:
    images = ImagesInProcess()
    start, step = await results(images)
    assert isinstance(start, StepOutcome)
    assert isinstance(step, StepOutcome)
    red, blue = name_of_image(RED), name_of_image(BLUE)
    assert (start.observation, step.observation) == ([shown(blue)], shown(red))
    assert await images.refused([blue, red], "ann") == []
    assert await images.refused([blue, red], "bob") == [blue, red]


async def test_where_no_images_are_taken_one_in_an_observation_breaks_its_step() -> None:
    for result in await results(None):
        assert (type(result), str(result)) == (EnvironmentBroken, NOT_TAKEN)


class PaintingSession(Session):
    """Shows a picture at each step, and counts its steps."""

    def __init__(self, steps: list[str]) -> None:
        self._steps = steps

    async def step(self, message_log: list[ChatMessage], extra_env_info: Nothing) -> StepOutcome:
        self._steps.append("step")
        return StepOutcome(shown(RED), 0.0, False)

    async def close(self) -> None:
        self._steps.append("close")


class PaintingSessions(Painter):
    def __init__(self, lost_session: LostSession) -> None:
        self.lost_session = lost_session
        self.steps: list[str] = []

    async def open_session(self, message_log: list[ChatMessage], extra_env_info: Nothing) -> Session:
        return PaintingSession(self.steps)


@pytest.mark.parametrize(("lost_session", "after"), [("fail", SessionLost), ("restart", RestartableSessionLost)])
async def test_a_session_whose_pictures_were_not_kept_makes_no_step_twice(
    lost_session: LostSession, after: type[RolloutFailure]
) -> None:
    environment = PaintingSessions(lost_session)
    full = ObservedImages(ImagesInProcess(ImagesSettings(max_bytes=10)), ImagesSettings())
    runner = StepRunner(environment, "painter", 60, full)
    step = StepRequest([], {}, step_id="a", session_id="s", turn=1)
    made = [await runner.start(replace(step, turn=turn), set()) for turn in (0, 1)]
    await runner.close()
    assert [type(result) for result in made] == [Overloaded, after]
    assert environment.steps == ["step", "close"]
