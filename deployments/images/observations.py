"""Images that environments show: kept by their replicas, so that only names travel to the ingress."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from deployments.failures import EnvironmentBroken, ImagesLost, Overloaded
from deployments.images.checks import ImageChecks
from deployments.images.failures import ImageRefused, ImagesFull
from deployments.images.settings import ImagesSettings
from deployments.protocols.images import ImageStore
from deployments.storage.storage import StorageFailed
from rollout_client.contract.messages import IMAGE_NAME
from rollout_env import ChatMessage, StepOutcome

LONGEST_SHOWN = 80
"""Characters of a name that is wrong."""
NOT_TAKEN = (
    "The environment's observation shows an image, and the service takes none: serve a model that does, with "
    "`images: {}` in the config."
)


class ObservedImages:
    """Keeps the images of observations. One for each replica of an environment."""

    def __init__(self, store: ImageStore, settings: ImagesSettings) -> None:
        self._store = store
        self._checks = ImageChecks(settings)

    async def kept(self, outcome: StepOutcome, owner: str | None) -> StepOutcome:
        """The outcome with the names of its images, all of which are kept for `owner`, the key of the rollout.

        Raises:
            EnvironmentBroken: one of them is not an image that the service takes, or a name that this owner may not
                use.
            Overloaded: there is no room for them.
            ImagesLost: the store cannot be reached.
        """
        messages = outcome.observations
        shown = list(chain.from_iterable(message.get("images", ()) for message in messages))
        if (most := self._checks.settings.max_images) < len(shown):
            raise _broken(f"it shows {len(shown)} images, and images.max_images allows {most}")
        contents = list(dict.fromkeys(image for image in shown if isinstance(image, bytes)))
        await asyncio.gather(*map(self._check, contents))
        try:
            await self._refuse_names([image for image in shown if isinstance(image, str)], owner)
            names = await self._store.put(contents, owner) if contents else []
        except ImagesFull as full:
            raise Overloaded(f"The images of an observation have no room: {full.problems[0].message}.") from full
        except StorageFailed as failed:
            raise ImagesLost(str(failed)) from failed
        name_of = dict(zip(contents, names, strict=True))
        named = [_with_names(message, name_of) for message in messages]
        return replace(outcome, observation=named if isinstance(outcome.observation, list) else named[0])

    async def _check(self, data: bytes) -> None:
        try:
            await self._checks.checked(data)
        except ImageRefused as refused:
            raise _broken(f"an image of {len(data)} bytes: {refused}") from refused

    async def _refuse_names(self, names: Sequence[str], owner: str | None) -> None:
        for name in names:
            if re.fullmatch(IMAGE_NAME, name) is None:
                raise _broken(
                    f"{name[:LONGEST_SHOWN]!r} is not the name of an image, sha256:...; return the bytes of its file"
                )
        if names and (refused := await self._store.refused(names, owner)):
            raise _broken(f"there is no image {refused[0]}, or it is another key's; return the bytes of its file")


def shows_images(outcome: StepOutcome) -> bool:
    return any(message.get("images") for message in outcome.observations)


def _with_names(message: ChatMessage, name_of: dict[bytes, str]) -> ChatMessage:
    if "images" not in message:
        return message
    names: list[bytes | str] = [name_of[image] if isinstance(image, bytes) else image for image in message["images"]]
    return {**message, "images": names}


def _broken(problem: str) -> EnvironmentBroken:
    return EnvironmentBroken(f"The environment's observation cannot be shown: {problem}.")
