"""Keys and what they allow. No I/O.

A key is 256 random bits that only its holder has. The service has its sha-256 alone, which is safe without salt and
without a slow hash because nobody can guess 256 random bits.

Guarantee: neither a key nor the hash of one is in any message or `repr` of this module.
"""

import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Literal, Self, get_args

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from deployments.strict_settings import StrictSettings

Scope = Literal["rollout", "policy", "read", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
KEY_PREFIX = "rollout-"
"""Tells programs that look for leaked secrets what they have found."""
KEY_BYTES = 32
KEY = re.compile(rf"{KEY_PREFIX}[\w-]+")


class KeysInvalid(Exception):
    """The content of a keys file is wrong; the message names each field and never its value."""


class _KeyEntry(StrictSettings):
    """One key of a keys file."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Whose key it is. Keys of one name share weight and quota: so a new one can take the place of an old one while
    both are valid."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    """Sha-256 of the key in hexadecimal digits. `python -m service.access.new_key` makes both."""
    scopes: frozenset[Scope] = Field(min_length=1)
    """Scopes of the key. `rollout`: play and score, and get samples. `policy`: change the weights. `read`: see the
    tasks, the weights' state and what the service is. `admin`: all of these."""
    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    """Share of the engines in proportion to other names' while both wait. The requests of one name divide it among
    them by their `priority`."""
    max_rollouts: int | None = Field(default=None, ge=1)
    """Most rollouts of all its requests in flight: samples times `num_generations`, from the headers of a request until
    its response is sent; null for no quota. Each ingress replica grants an equal share, rounded down and at least 1:
    the quota divided by `num_replicas` of the deployment `Ingress`, with autoscaling by its `max_replicas`."""

    @field_validator("sha256")
    @classmethod
    def refuse_the_hash_of_nothing(cls, given: str) -> str:
        if given == sha256(b"").hexdigest():
            raise ValueError("it is the hash of an empty key")
        return given


class KeysFile(StrictSettings):
    """The content of a keys file."""

    keys: list[_KeyEntry]
    """With an empty list no key is valid."""

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Self:
        first_of: dict[str, _KeyEntry] = {}
        hashes: set[str] = set()
        for position, key in enumerate(self.keys):
            first = first_of.setdefault(key.name, key)
            if (key.weight, key.max_rollouts) != (first.weight, first.max_rollouts):
                raise ValueError(f"keys.{position}: the entries of {key.name} have different weight or max_rollouts")
            if key.sha256 in hashes:
                raise ValueError(f"keys.{position}: {key.name} has the hash of another entry; make each key anew")
            hashes.add(key.sha256)
        return self


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, and what that allows."""

    name: str | None
    """Name of the key; `None` where the service asks for no key."""
    scopes: frozenset[Scope]
    weight: float = 1.0
    max_rollouts: int | None = None

    @property
    def namespace(self) -> str:
        """Under which the service keeps what is the caller's alone; no key has an empty name."""
        return self.name or ""

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


ANYBODY = Caller(None, frozenset(SCOPES))
"""Every caller of a service that asks for no key."""


class KeyRing:
    """The keys that are valid at one moment."""

    def __init__(self, entries: Sequence[_KeyEntry]) -> None:
        self._callers = [
            (entry.sha256, Caller(entry.name, entry.scopes, entry.weight, entry.max_rollouts)) for entry in entries
        ]

    def __len__(self) -> int:
        return len(self._callers)

    def caller_with(self, key: str) -> Caller | None:
        """Takes equally long for every key that is not valid, whatever it begins with."""
        hashed = hash_of(key)
        found = None
        for valid, caller in self._callers:
            if hmac.compare_digest(valid, hashed):
                found = caller
        return found

    def caller_named(self, name: str) -> Caller | None:
        """Whoever holds the keys of this name, with all that one of them allows; `None` if none is valid."""
        holders = [caller for _, caller in self._callers if caller.name == name]
        if not holders:
            return None
        return replace(holders[0], scopes=frozenset[Scope]().union(*(holder.scopes for holder in holders)))


def parsed_keys(content: bytes) -> KeyRing:
    """The keys of a keys file. Raises `KeysInvalid`: it has another form."""
    try:
        return KeyRing(KeysFile.model_validate(yaml.safe_load(content)).keys)
    except ValidationError as error:
        # Without the values: somebody may have written a key in the place of its hash.
        found = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise KeysInvalid(KEY.sub(f"{KEY_PREFIX}...", "; ".join(text.removeprefix(": ") for text in found))) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        # YAML's messages quote the line.
        raise KeysInvalid("it is neither YAML nor JSON") from None


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: str) -> str:
    return sha256(key.encode(errors="surrogateescape")).hexdigest()
