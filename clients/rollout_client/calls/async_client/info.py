"""Methods of the client that describe the service, check a trainer's tokenizer, score tokens, and keep images."""

import logging
from collections.abc import Iterable
from http import HTTPStatus
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.concurrency import async_call_blocking
from rollout_client.calls.options import SHORT_CALL_ADVICE, SHORT_CALL_TIMEOUT_S, CallOptions
from rollout_client.calls.rollouts import (
    ScoreOptions,
    image_call,
    info_call,
    score_call,
    upload_image_call,
    vocabulary_call,
)
from rollout_client.contract.info import ScoreResponse, ServiceInfo
from rollout_client.errors import RequestRejected
from rollout_client.tokenizer_check import check_tokenizer, has_other_vocabulary


class AsyncScoreMethods:
    _connection: AsyncConnection

    async def score(self, sequences: Iterable[Iterable[int]], **options: Unpack[ScoreOptions]) -> ScoreResponse:
        """The log-probability of each token of `sequences` under the service's weights, in input order.

        Each sequence is a list of token ids, or a one-dimensional array or tensor of them. The log-probabilities are
        those of temperature 1, without top-p, top-k and min-p. A sequence that failed has an `error`.
        """
        limits = self._connection.defaults.limits(options)
        return await self._connection.result(score_call(sequences, options), limits)


logger = logging.getLogger("rollout_client")


class AsyncInfoMethods:
    _connection: AsyncConnection

    async def info(self, **options: Unpack[CallOptions]) -> ServiceInfo:
        """Model, tokenizer, limits, versions and tasks of the service."""
        return await self._connection.short(info_call(), options)

    async def check_tokenizer(self, tokenizer: Any, **options: Unpack[CallOptions]) -> None:
        """Checks that `tokenizer`, one of transformers, makes the tokens that the service's tokenizer makes.

        Vocabulary, tokens of some texts and chat template are compared. A service that is too old to say is not
        checked; a warning says so.

        Raises:
            TokenizerDiffers: it makes other tokens; the message names what differs.
        """
        limits = self._connection.defaults.limits(options, SHORT_CALL_TIMEOUT_S, SHORT_CALL_ADVICE)
        try:
            info = await self._connection.result(info_call(), limits)
        except RequestRejected as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            logger.warning("The service has no /info: whether its tokenizer is the same is not checked.")
            return
        service_tokens = None
        if await async_call_blocking(has_other_vocabulary, tokenizer, info):
            service_tokens = (await self._connection.result(vocabulary_call(), limits)).tokens
        await async_call_blocking(check_tokenizer, tokenizer, info, service_tokens)


class AsyncBlobMethods:
    """The methods of a client for images of messages."""

    _connection: AsyncConnection

    async def upload_image(self, image: bytes | str | PathLike[str], **options: Unpack[CallOptions]) -> str:
        """Uploads a PNG or JPEG image, and returns its name for messages.

        A part `{"type": "image", "image": name}` of a message shows it. Uploaded again it has the same name.

        Args:
            image: the content of the file, or its path.
        """
        content = image if isinstance(image, bytes) else await async_call_blocking(Path(image).read_bytes)
        return await self._connection.short(upload_image_call(content), options)

    async def image(self, name: str, **options: Unpack[CallOptions]) -> bytes:
        """The file of an image, by the name that `upload_image`, a message or `mm_ranges` has."""
        return await self._connection.short(image_call(name), options)
