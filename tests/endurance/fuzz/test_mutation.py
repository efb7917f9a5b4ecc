"""Mutations of bodies: repeatable, different from the body, and of the kind that they say."""

import json
from random import Random

import pytest

from tests.endurance.fuzz.bodies import LINES, ROLLOUT, TARGETS, WEIGHTS
from tests.endurance.fuzz.mutation import mutated_bytes, mutated_json, mutated_lines, mutated_safetensors

CASES = 200


@pytest.mark.parametrize("name", TARGETS)
def test_a_mutation_is_decided_by_its_seed_and_few_are_alike(name: str) -> None:
    target = TARGETS[name]
    mutated = [target.mutate(target.seed, Random(seed)) for seed in range(CASES)]
    assert mutated == [target.mutate(target.seed, Random(seed)) for seed in range(CASES)]
    assert len(set(mutated) - {target.seed}) > CASES / 3


def test_most_mutated_json_is_json_and_keeps_most_of_the_body() -> None:
    mutated = [mutated_json(ROLLOUT, Random(seed)) for seed in range(CASES)]
    documents = [body for body in mutated if is_json(body)]
    assert len(documents) > CASES / 2
    assert sum(b'"samples"' in body for body in mutated) > CASES * 3 / 4


def is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def test_mutated_safetensors_say_wrong_lengths_wrong_headers_and_wrong_bytes() -> None:
    said = int.from_bytes(WEIGHTS[:8], "little")
    kinds = set()
    for seed in range(CASES):
        body = mutated_safetensors(WEIGHTS, Random(seed))
        length = int.from_bytes(body[:8], "little")
        kinds.add((length == said, body[8:] == WEIGHTS[8:]))
    assert {(False, True), (False, False), (True, False)} <= kinds


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"null", b"1"])
def test_bodies_without_places_can_be_mutated(body: bytes) -> None:
    for seed in range(CASES):
        assert isinstance(mutated_bytes(body, Random(seed)), bytes)
        assert isinstance(mutated_lines(body, Random(seed)), bytes)
        if body:
            assert isinstance(mutated_json(body, Random(seed)), bytes)


def test_lines_are_dropped_repeated_and_mixed() -> None:
    counts = {mutated_lines(LINES, Random(seed)).count(b"\n") - LINES.count(b"\n") for seed in range(CASES)}
    assert {-1, 0, 1} <= counts
