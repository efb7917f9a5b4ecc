"""Signs results: whoever has one later can ask whether the service made it as it is. No I/O but reading the secret.

Signed are the ids of all messages, the log-probabilities, versions and reasons of ending of those that were generated,
and the numbers of `replay`. The text of a message follows from its ids, and rewards are not signed. A signature is an
HMAC-SHA256; the same secret on all ingress replicas, also after a restart, checks those of any of them.
"""

import hmac
import json
import sys
from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from rollout_client.contract.messages import Message
from rollout_client.contract.origins import ReplayRecord
from rollout_client.contract.replay import SignatureVerdict
from rollout_client.contract.rollouts import SampleResult
from service.settings import AccessSettings

LEAST_SECRET_BYTES = 32
SCHEME = "v1"
"""The first part of a signature: how its bytes are made."""
SIGNATURE = "signature"


class SecretNotReadable(Exception):
    """The file of the secret cannot be read at the start, or holds too little."""


class ResultSigner:
    """Signs with one secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def of(cls, settings: AccessSettings) -> Self | None:
        """Signs with the secret of the settings; `None` where they name none. Raises `SecretNotReadable`."""
        return None if settings.signing_secret_file is None else cls.of_file(Path(settings.signing_secret_file))

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Raises `SecretNotReadable`."""
        try:
            secret = path.expanduser().read_bytes().strip()
        except OSError as error:
            raise SecretNotReadable(f"access.signing_secret_file: {error.strerror} ({path})") from error
        if len(secret) < LEAST_SECRET_BYTES:
            raise SecretNotReadable(
                f"access.signing_secret_file: {path} has {len(secret)} bytes; write at least {LEAST_SECRET_BYTES}, as "
                "`openssl rand -hex 32` does"
            )
        return cls(secret)

    def sign(self, result: SampleResult) -> None:
        """Adds the signature to the result's `replay`, if it has one: a `ReplayRecord`, or its fields."""
        record: Any = result.replay
        if isinstance(record, dict):
            record[SIGNATURE] = self.signature_of(result)
        elif record is not None:
            record.signature = self.signature_of(result)

    def signature_of(self, result: SampleResult) -> str:
        signed = hmac.new(self._secret, digestmod=sha256)
        # Read again, because JSON and tables leave out what is null or a default.
        numbers = ReplayRecord.model_validate(result.replay).model_dump(mode="json", exclude={SIGNATURE})
        about = {"rollout_id": result.rollout_id, "messages": len(result.message_log), "replay": numbers}
        signed.update(canonical(about))
        for message in result.message_log:
            add_message(signed, message)
        return f"{SCHEME}:{signed.hexdigest()}"


def signature_verdict(result: SampleResult, signer: ResultSigner | None) -> SignatureVerdict:
    if signer is None:
        return "not_checked"
    given = None if result.replay is None else result.replay.signature
    if given is None:
        return "not_signed"
    return "signed" if hmac.compare_digest(given, signer.signature_of(result)) else "does_not_match"


def add_message(signed: "hmac.HMAC", message: Message) -> None:
    logprobs = message.generation_logprobs
    about = {
        "role": message.role,
        "ids": len(message.token_ids),
        "logprobs": logprobs is not None,
        "finish_reason": message.finish_reason,
        "versions": [[span.version, span.start, span.end] for span in message.weight_versions or ()],
        "images": [[shown.media, shown.start, shown.end] for shown in message.mm_ranges or ()],
    }
    signed.update(canonical(about))
    signed.update(little_endian(array("i", message.token_ids)))
    if logprobs is not None:
        signed.update(little_endian(array("f", logprobs)))


def little_endian(numbers: "array[Any]") -> "array[Any]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
