"""Keys: what a keys file may hold, which key is found, and that no message tells one."""

import logging
from hashlib import sha256
from typing import Any

import pytest
import yaml

from service.access.keys import Caller, KeysInvalid, hash_of, new_key, parsed_keys
from tests.patterns import whole

KEY, OTHER = new_key(), new_key()
ENTRY: dict[str, Any] = {"name": "team", "sha256": hash_of(KEY), "scopes": ["rollout"]}


def content(*entries: dict[str, Any]) -> bytes:
    return yaml.safe_dump({"keys": list(entries)}).encode()


def test_a_new_key_has_256_random_bits_and_its_hash_is_sha256() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert len(KEY.removeprefix("rollout-")) == 43
    assert hash_of(KEY) == sha256(KEY.encode()).hexdigest()


def test_a_key_gives_the_caller_of_its_entry() -> None:
    keys = parsed_keys(
        content(ENTRY | {"weight": 4, "max_rollouts": 64}, {**ENTRY, "name": "b", "sha256": hash_of(OTHER)})
    )
    assert keys.caller_with(KEY) == Caller("team", frozenset({"rollout"}), 4.0, 64)
    assert keys.caller_with(OTHER) == Caller("b", frozenset({"rollout"}))


@pytest.mark.parametrize(
    "wrong",
    ["", KEY[:-1], KEY.upper(), f" {KEY}", hash_of(KEY), "rollout-", "\udce9"],
    # Keys are random: without names of their own, the tests would have others in each process.
    ids=["empty", "shortened", "upper case", "with a space", "its hash", "its prefix", "no text"],
)
def test_a_key_that_is_nearly_right_is_wrong(wrong: str) -> None:
    assert parsed_keys(content(ENTRY)).caller_with(wrong) is None


def test_an_empty_list_lets_nobody_in() -> None:
    assert parsed_keys(b"keys: []").caller_with(KEY) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "a b"}, "keys.0.name: String should match pattern '^[A-Za-z0-9._-]{1,64}$'"),
        ({"sha256": KEY}, "keys.0.sha256: String should match pattern '^[0-9a-f]{64}$'"),
        ({"sha256": hash_of("")}, "keys.0.sha256: Value error, it is the hash of an empty key"),
        ({"scopes": []}, "keys.0.scopes: Frozenset should have at least 1 item after validation, not 0"),
        ({"scopes": ["root"]}, "keys.0.scopes.0: Input should be 'rollout', 'policy', 'read' or 'admin'"),
        ({"weight": 0}, "keys.0.weight: Input should be greater than 0"),
        ({"weight": float("inf")}, "keys.0.weight: Input should be a finite number"),
        ({"max_rollouts": 0}, "keys.0.max_rollouts: Input should be greater than or equal to 1"),
        ({"qoutas": {}}, "keys.0.qoutas: unknown; permitted are name, sha256, scopes, weight, max_rollouts"),
    ],
)
def test_a_wrong_entry_is_named_with_its_field(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(KeysInvalid, match=whole(message)):
        parsed_keys(content(ENTRY | wrong))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"weight": 2}, "Value error, keys.1: the entries of team have different weight or max_rollouts"),
        ({"sha256": hash_of(KEY)}, "Value error, keys.1: team has the hash of another entry; make each key anew"),
    ],
)
def test_entries_that_contradict_each_other_are_refused(second: dict[str, Any], message: str) -> None:
    with pytest.raises(KeysInvalid, match=whole(message)):
        parsed_keys(content(ENTRY, {**ENTRY, "sha256": hash_of(OTHER), **second}))


@pytest.mark.parametrize(
    "file", [b"keys: [", b"\xff\xfe\xfa", b"keys: !!python/object:os.system {}", b"", b"[]", b"keys:"]
)
def test_what_is_no_keys_file_is_refused(file: bytes) -> None:
    with pytest.raises(KeysInvalid):
        parsed_keys(file)


@pytest.mark.parametrize(
    "file",
    [
        yaml.safe_dump({"keys": [ENTRY | {"sha256": KEY}]}).encode(),
        yaml.safe_dump({"keys": [KEY]}).encode(),
        f"keys: [{KEY}".encode(),
        yaml.safe_dump({"keys": [{**ENTRY, KEY: 1}]}).encode(),
    ],
    ids=["in place of its hash", "in place of an entry", "in a broken line", "as a field"],
)
def test_a_key_in_the_place_of_its_hash_is_not_repeated(file: bytes) -> None:
    with pytest.raises(KeysInvalid) as raised:
        parsed_keys(file)
    assert KEY.removeprefix("rollout-") not in str(raised.value)


def test_a_caller_shows_neither_key_nor_hash(caplog: pytest.LogCaptureFixture) -> None:
    keys = parsed_keys(content(ENTRY))
    with caplog.at_level(logging.DEBUG):
        shown = repr([keys, keys.caller_with(KEY)]) + caplog.text
    assert KEY not in shown
    assert hash_of(KEY) not in shown
