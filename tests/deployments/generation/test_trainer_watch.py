"""A trainer that falls silent is hung up on; one that is slow is not."""

import time
from collections.abc import Iterable
from threading import Event
from typing import Any

import pytest

from deployments.generation.trainer_transfer import TrainerWatch

LONG_ENOUGH_S = 40.0


class Model:
    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.seen: list[Any] = []

    def load_weights(self, weights: Iterable[Any]) -> int:
        self.loaded.extend(weights)
        return len(self.loaded)


def test_silence_makes_it_hang_up_once_so_that_what_waits_can_fail() -> None:
    hung_up: list[str] = []
    fails = Event()

    def hang_up() -> None:
        hung_up.append("now")
        fails.set()

    with TrainerWatch(0.05, hang_up) as watch:
        assert fails.wait(LONG_ENOUGH_S)
        time.sleep(0.1)
    assert (watch.has_hung_up, hung_up) == (True, ["now"])


def test_a_block_that_ends_in_time_is_left_at_once() -> None:
    began = time.monotonic()
    with TrainerWatch(LONG_ENOUGH_S, pytest.fail) as watch:
        pass
    assert time.monotonic() - began < LONG_ENOUGH_S
    assert not watch.has_hung_up


def test_each_tensor_counts_as_a_sign_of_life() -> None:
    """The whole takes longer than the limit, and no tensor does."""

    def attempt(limit_s: float) -> bool:
        def arriving() -> Iterable[int]:
            for number in range(8):
                time.sleep(limit_s / 5)
                yield number

        model = Model()
        with TrainerWatch(limit_s, lambda: None) as watch, watch.noting_weights_of(model, model.seen.append):
            assert model.load_weights(arriving()) == 8
        assert (model.seen, model.loaded) == (list(range(8)), list(range(8)))
        assert "load_weights" not in vars(model), "the model is as it was"
        return not watch.has_hung_up

    # A busy machine may lose half a second between two tensors, and hardly five.
    assert attempt(0.5) or attempt(5.0)


def test_an_error_goes_through_and_leaves_the_model_as_it_was() -> None:
    def arriving() -> Iterable[int]:
        yield 1
        raise KeyError("missing")

    model, watch = Model(), TrainerWatch(LONG_ENOUGH_S, pytest.fail)
    with pytest.raises(KeyError), watch, watch.noting_weights_of(model, model.seen.append):
        model.load_weights(arriving())
    assert (model.seen, "load_weights" in vars(model)) == ([1], False)
