"""Images that environments show: kept by their replicas, so that only names travel to the ingress."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from deployments.failures import EnvironmentBroken, ImagesLost, Overloaded
from deployments.images.checks import CheckedImages
from deployments.images.failures import ImagesFull
from deployments.images.settings import ImagesSettings
from deployments.protocols.images import ImageStore
from deployments.storage.storage import StorageFailed
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
        self._images = CheckedImages(store, settings)

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
        if (most := self._images.settings.max_images) < len(shown):
            raise _broken(f"it shows {len(shown)} images, and images.max_images allows {most}")
        try:
            names, refusals = await self._images.keep(shown, owner)
        except ImagesFull as full:
            raise Overloaded(f"The images of an observation have no room: {full.problems[0].message}.") from full
        except StorageFailed as failed:
            raise ImagesLost(str(failed)) from failed
        for image, refusal in refusals.items():
            what = f"an image of {len(image)} bytes" if isinstance(image, bytes) else repr(image[:LONGEST_SHOWN])
            raise _broken(f"{what}: {refusal}")
        named = [_with_names(message, names) for message in messages]
        return replace(outcome, observation=named if isinstance(outcome.observation, list) else named[0])


def shows_images(outcome: StepOutcome) -> bool:
    return any(message.get("images") for message in outcome.observations)


def _with_names(message: ChatMessage, name_of: Mapping[bytes | str, str]) -> ChatMessage:
    if "images" not in message:
        return message
    names: list[bytes | str] = [name_of[image] for image in message["images"]]
    return {**message, "images": names}


def _broken(problem: str) -> EnvironmentBroken:
    return EnvironmentBroken(f"The environment's observation cannot be shown: {problem}.")
