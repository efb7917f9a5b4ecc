"""The tokens of the images that prompts and observations show, as the engines' model writes them."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from deployments.protocols.generation import Generator
from deployments.protocols.images import ImageTokens
from deployments.rpc.background_tasks import SharedCalls

MOST_KNOWN = 2**14
"""An image has some hundred to some thousand tokens, of 4 bytes each."""


class ImageReader:
    """Asks an engine once for the tokens of each image. All requests of an event loop share it."""

    def __init__(self, generator: Generator, most_known: int = MOST_KNOWN) -> None:
        self._generator = generator
        self._most_known = most_known
        self._known: OrderedDict[str, ImageTokens] = OrderedDict()
        self._asked = SharedCalls(self._ask)

    async def learn(self, names: Iterable[str], into: dict[str, ImageTokens]) -> None:
        """Adds the tokens of these images to `into`, where they are missing. Raises what `image_tokens` raises."""
        missing = [name for name in dict.fromkeys(names) if name not in into]
        into.update(zip(missing, await asyncio.gather(*map(self._tokens, missing)), strict=True))

    async def _tokens(self, name: str) -> ImageTokens:
        if (known := self._known.get(name)) is not None:
            self._known.move_to_end(name)
            return known
        return await self._asked.result(name)

    async def _ask(self, name: str) -> ImageTokens:
        [tokens] = await self._generator.image_tokens([name])
        self._known[name] = tokens
        if len(self._known) > self._most_known:
            self._known.popitem(last=False)
        return tokens
