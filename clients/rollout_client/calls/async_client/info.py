"""The methods of the client that show what the service is, and check that a trainer matches it."""

import logging
from http import HTTPStatus
from typing import Any, Unpack

from rollout_client.calls.async_client.connection import AsyncConnection
from rollout_client.calls.concurrency import async_call_blocking
from rollout_client.calls.options import CallOptions
from rollout_client.calls.rollouts import info_call, vocabulary_call
from rollout_client.contract.info import ServiceInfo
from rollout_client.deadline import SHORT_CALL_ADVICE, SHORT_CALL_TIMEOUT_S
from rollout_client.errors import RequestRejected
from rollout_client.tokenizer_check import check_tokenizer, has_other_vocabulary

logger = logging.getLogger("rollout_client")


class AsyncInfoMethods:
    _connection: AsyncConnection

    async def info(self, **options: Unpack[CallOptions]) -> ServiceInfo:
        """Model, tokenizer, limits, versions and tasks of the service."""
        limits = self._connection.defaults.limits(options, SHORT_CALL_TIMEOUT_S, SHORT_CALL_ADVICE)
        return await self._connection.result(info_call(), limits)

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
