"""Mutated answers to the client, which may refuse them by an error of its own: nothing else may happen."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import httpx

from rollout_client.arrow.schema import ARROW
from rollout_client.calls.arrow_bodies import read_response
from rollout_client.calls.ndjson import NdjsonReader
from rollout_client.errors import RolloutError
from tests.endurance.fuzz.bodies import ROLLOUT, Mutate
from tests.endurance.fuzz.mutation import mutated_bytes, mutated_lines
from tests.endurance.fuzz.tally import Tally

EXPECTED = 4
"""Rollouts in the answer to `ROLLOUT`."""
ANSWER_TIMEOUT_S = 60.0
LONGEST_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Reader:
    """One kind of answer. `read` raises `RolloutError` for what it does not understand."""

    accept: str
    mutate: Mutate
    read: Callable[[bytes, Random], None]


def read_lines(answer: bytes, draw: Random) -> None:
    reader = NdjsonReader(EXPECTED)
    begin = 0
    while begin < len(answer):
        end = begin + draw.randint(1, LONGEST_CHUNK)
        for _ in reader.feed(answer[begin:end]):
            pass
        begin = end
    reader.end()


def read_arrow(answer: bytes, _draw: Random) -> None:
    read_response(answer).to_response()


READERS: Mapping[str, Reader] = {
    "NDJSON that the client reads": Reader("application/x-ndjson", mutated_lines, read_lines),
    "Arrow that the client reads": Reader(ARROW, mutated_bytes, read_arrow),
}


def fuzz_reader(url: str, reader: Reader, cases: range, seed: int, headers: Mapping[str, str]) -> Tally:
    """Mutates one answer of the service once for each number."""
    asked = {**headers, "accept": reader.accept, "content-type": "application/json"}
    response = httpx.post(f"{url}/v1/rollout", content=ROLLOUT, headers=asked, timeout=ANSWER_TIMEOUT_S)
    answer = response.raise_for_status().content

    tally = Tally()
    for number in cases:
        draw = Random(f"{seed} {number}")
        tally.add(Tally(1, problems_of(reader, reader.mutate(answer, draw), draw)))
    return tally


def problems_of(reader: Reader, answer: bytes, draw: Random) -> list[str]:
    try:
        reader.read(answer, draw)
    except RolloutError:
        return []
    except Exception as error:  # noqa: BLE001 - whatever else is raised is what is looked for
        return [f"{type(error).__name__}: {error}"]
    return []
