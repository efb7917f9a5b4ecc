"""Which calls an abort ends."""

from hypothesis import given
from hypothesis import strategies as st

from deployments.generation.serving.call_aborts import MOST_REMEMBERED, AbortableCall, CallAborts
from deployments.protocols.generation import SamplingOptions
from deployments.protocols.model_server import CallsToAbort, ServedRequest


async def interrupts_nothing(ids: object) -> None:
    raise AssertionError(ids)


def call_at(received_at: float, rid: str = "r-1") -> AbortableCall:
    request = ServedRequest("id", range(1), 1, (), SamplingOptions(), received_at=received_at)
    return AbortableCall(request, rid, "id")


@given(st.integers(0, 1000), st.lists(st.integers(0, 1000), min_size=1))
def test_an_abort_ends_the_calls_before_it_and_no_later_ones(received_at: int, aborted_at: list[int]) -> None:
    aborts = CallAborts(interrupts_nothing)
    for until in aborted_at:
        aborts.note(CallsToAbort(None, "r", until))
    assert aborts.is_aborted(call_at(received_at)) is (received_at < max(aborted_at))


def test_an_abort_is_of_one_key_and_one_beginning_and_the_oldest_is_forgotten() -> None:
    aborts, call = CallAborts(interrupts_nothing), call_at(5.0)
    for key, rid in (("team", ""), (None, "r-2")):
        aborts.note(CallsToAbort(key, rid, 6.0))
    assert not aborts.is_aborted(call)
    aborts.note(CallsToAbort(None, "", 6.0))
    assert aborts.is_aborted(call)
    for number in range(MOST_REMEMBERED):
        aborts.note(CallsToAbort("other", str(number), 9.0))
    assert not aborts.is_aborted(call)
