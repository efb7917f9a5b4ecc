"""Which calls an abort ends, among processes whose clocks have nothing to do with each other."""

from dataclasses import dataclass
from unittest.mock import AsyncMock

from hypothesis import given
from hypothesis import strategies as st

from deployments.generation.serving.call_aborts import MOST_REMEMBERED, AbortableCall, CallAborts
from deployments.protocols.generation import SamplingOptions
from deployments.protocols.model_server import CallsToAbort, ServedRequest

SECONDS = st.integers(0, 1000).map(float)


@dataclass(frozen=True, slots=True)
class Sent:
    """What an ingress received at a time, sent after a while, and what took a while to the replica. In true seconds."""

    ingress: str
    received_at: float
    waits_s: float
    takes_s: float

    @property
    def arrives_at(self) -> float:
        return self.received_at + self.waits_s + self.takes_s


def sent(waits: st.SearchStrategy[float] = SECONDS) -> st.SearchStrategy[Sent]:
    return st.builds(Sent, st.sampled_from("ab"), SECONDS, waits, SECONDS)


@given(
    sent(),
    sent(st.just(0.0)),
    st.fixed_dictionaries({name: st.integers(-(10**6), 10**6) for name in ("a", "b", "replica")}),
)
def test_an_abort_ends_only_earlier_calls_whatever_clocks_say(call: Sent, abort: Sent, clocks: dict[str, int]) -> None:
    aborted = CallAborts(AsyncMock())
    aborted.note(
        CallsToAbort(None, "r", abort.ingress, abort.received_at + clocks[abort.ingress]),
        abort.arrives_at + clocks["replica"],
    )
    request = ServedRequest(
        *("id", range(1), 1, (), SamplingOptions()),
        ingress=call.ingress,
        received_at=call.received_at + clocks[call.ingress],
        age_s=call.waits_s,
        arrived_at=call.arrives_at + clocks["replica"],
    )
    is_aborted = aborted.is_aborted(AbortableCall(request, "r-1", "id"))
    if call.ingress == abort.ingress:
        assert is_aborted is (call.received_at < abort.received_at)
    elif call.received_at + call.takes_s < abort.received_at:
        assert is_aborted
    elif call.received_at >= abort.arrives_at:
        assert not is_aborted


def test_aborts_of_ingresses_are_kept_and_the_oldest_is_forgotten() -> None:
    aborted = CallAborts(AsyncMock())
    request = ServedRequest("id", range(1), 1, (), SamplingOptions(), ingress="a", received_at=5.0, arrived_at=50.0)
    call = AbortableCall(request, "r", "id")
    aborted.note(CallsToAbort(None, "", "a", 6.0), 60.0)
    aborted.note(CallsToAbort(None, "", "a", 4.0), 61.0)
    aborted.note(CallsToAbort(None, "", "b", 0.0), 40.0)
    assert aborted.is_aborted(call)
    for number in range(MOST_REMEMBERED):
        aborted.note(CallsToAbort("other", str(number), "a", 9.0), 90.0)
    assert not aborted.is_aborted(call)
