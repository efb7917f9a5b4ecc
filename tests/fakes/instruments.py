"""Ray's instruments, which remember what they are given."""

from typing import Any

Given = list[tuple[str, dict[str, str], float]]
"""Names, tags and values, in the order in which they came."""


def remembering(given: Given) -> Any:
    """A class that stands for a counter and a gauge of Ray."""

    class Instrument:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert description
            self._name, self._keys = name, set(tag_keys)

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == self._keys
            given.append((self._name, tags, value))

        inc = set

    return Instrument
