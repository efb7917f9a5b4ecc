"""A Serve handle to a store."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any


class StoreHandle:
    """`answer` gets the method and the arguments of each call; an exception that it returns is raised."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer
        self.calls: list[tuple[Any, ...]] = []
        self.is_by_reference = False

    def options(self, _by_reference: bool) -> "StoreHandle":
        self.is_by_reference = _by_reference
        return self

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.calls.append((method, *arguments, *([named] if named else [])))
        result = self._answer(method, *arguments)
        if isinstance(result, Exception):
            raise result
        return result
