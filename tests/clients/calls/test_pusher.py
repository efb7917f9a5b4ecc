"""Pushing a model again and again: in full, or what changed. The bits of a delta are tested with `PushedWeights`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from tenacity import wait_none

from rollout_client import AsyncPolicyPusher, AsyncRolloutClient, PolicyPusher, RequestRejected, RolloutClient
from rollout_client.calls.upload import compressed
from rollout_client.contract.policy import PolicyLayout, PushResult
from rollout_client.weights.sources import full_weights
from tests.clients.scripted_policy import CUT, ScriptedPolicy, serving
from tests.patterns import whole
from tests.virtual_time import runs

LAYOUT = {"embed.weight": ("BF16", [64, 8]), "norm.weight": ("F32", [8])}
State = dict[str, torch.Tensor]
Push = Callable[..., list[PushResult]]


def states(count: int) -> list[State]:
    """Each differs from the one before it in two values."""
    torch.manual_seed(0)
    all_states = [{"embed.weight": torch.randn(64, 8), "norm.weight": torch.randn(8)}]
    for step in range(1, count):
        state = {name: tensor.clone() for name, tensor in all_states[-1].items()}
        state["embed.weight"][step, 3] += 1
        state["embed.weight"][63, 7] = -0.0 if step % 2 else 0.0
        all_states.append(state)
    return all_states


def in_wire_dtypes(state: State) -> State:
    return {"embed.weight": state["embed.weight"].bfloat16(), "norm.weight": state["norm.weight"]}


def push_sync(url: str, pushed: list[State], **options: Any) -> list[PushResult]:
    with RolloutClient(url, retries=0) as client:
        pusher = PolicyPusher(client, **options)
        return [pusher.push(state) for state in pushed]


@runs
async def push_async(url: str, pushed: list[State], **options: Any) -> list[PushResult]:
    async with AsyncRolloutClient(url, retries=0) as client:
        pusher = AsyncPolicyPusher(client, **options)
        return [await pusher.push(state) for state in pushed]


class Service(ScriptedPolicy):
    """Believes the checksum that a push names."""

    def __init__(self) -> None:
        super().__init__(layout=dict(LAYOUT))
        self.checksum_of = lambda version, _: {put.version: put.query.get("checksum") for put in self.puts}.get(version)

    @property
    def kinds(self) -> list[str]:
        return [put.query["kind"] for put in self.puts]

    @property
    def bases(self) -> list[str | None]:
        return [put.query.get("base") for put in self.puts]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr("rollout_client.retry.BACKOFF", wait_none())
    service = Service()
    with serving(service):
        yield service


@contextmanager
def pusher_that_pushed(service: Service, state: State) -> Iterator[PolicyPusher]:
    with RolloutClient(service.url, retries=0) as client:
        pusher = PolicyPusher(client)
        pusher.push(state)
        yield pusher


@pytest.mark.parametrize("push", [push_sync, push_async])
def test_full_weights_come_first_and_then_what_changed(service: Service, push: Push) -> None:
    pushed = states(4)
    updates = push(service.url, pushed)
    assert [update.version for update in updates] == [1, 2, 3, 4]
    assert service.kinds == ["full", "delta", "delta", "delta"]
    assert service.bases == [None, "1", "2", "3"]
    assert [put.query["checksum"] for put in service.puts] == [update.checksum for update in updates]
    assert [update.sent_bytes for update in updates] == [len(put.body) for put in service.puts]
    assert save(load(service.content(1))) == save(in_wire_dtypes(pushed[0]))
    assert len(service.versions[2]) < len(service.versions[1]) / 2


def test_partial_weights_come_first_and_then_what_changed_of_them(service: Service) -> None:
    trained = [{"embed.weight": state["embed.weight"]} for state in states(3)]
    push_sync(service.url, trained, is_partial=True)
    assert service.kinds == ["partial", "delta", "delta"]
    assert service.bases == [None, "1", "2"]
    assert not any("checksum" in put.query for put in service.puts)


def test_a_model_in_the_dtype_of_the_wire_may_change_after_it_was_taken(service: Service) -> None:
    state = in_wire_dtypes(states(1)[0])
    kept = save(state)
    with RolloutClient(service.url) as client:
        pusher = PolicyPusher(client)
        captured = pusher.capture(state)
        state["norm.weight"].zero_()
        pusher.send(captured)
    assert save(load(service.content(1))) == kept


def test_the_last_result_is_kept_with_its_captures_seconds(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with RolloutClient(service.url) as client:
        pusher = PolicyPusher(client)
        capture = pusher.capture

        def slow(*arguments: Any, **options: Any) -> Any:
            sleep(0.05)
            return capture(*arguments, **options)

        monkeypatch.setattr(pusher, "capture", slow)
        update = pusher.push(states(1)[0])
    assert pusher.update == update
    assert update.push_s >= 0.05


def test_full_weights_come_again_after_somebody_else_pushed(service: Service) -> None:
    first, second = states(2)
    with pusher_that_pushed(service, first) as pusher:
        pusher.client.push_weights(second)
        assert pusher.push(second).version == 3
    assert service.kinds == ["full", "full", "full"]


def test_a_push_that_failed_leaves_the_base_and_the_next_one_changes_it(service: Service) -> None:
    first, second, third = states(3)
    with pusher_that_pushed(service, first) as pusher:
        service.script.append(CUT)
        with pytest.raises(Exception, match="cannot be reached"):
            pusher.push(second)
        assert pusher.push(third).version == 2
    assert service.kinds == ["full", "delta", "delta"]
    assert service.bases == [None, "1", "1"]


def test_full_weights_come_after_a_delta_that_was_refused(service: Service) -> None:
    first, second = states(2)
    with pusher_that_pushed(service, first) as pusher:
        service.script.append((422, {}))
        with pytest.raises(RequestRejected):
            pusher.push(second)
        pusher.push(second)
    assert service.kinds == ["full", "delta", "full"]


def test_checksums_are_made_only_where_they_are_asked_for(service: Service) -> None:
    push_sync(service.url, states(2), is_verified=False)
    assert ["checksum" in put.query for put in service.puts] == [False, False]


def test_what_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numpy", "zstandard", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("pushed_weights", "delta", "torch_tensors"):
        monkeypatch.delitem(sys.modules, f"rollout_client.weights.{name}", raising=False)
    nothing = PolicyLayout(tensors={})
    needs: dict[str, Callable[[], object]] = {
        'PolicyPusher needs numpy: pip install "rollout-client[weights]"': lambda: PolicyPusher(RolloutClient()),
        'Compressing weights needs zstandard: pip install "rollout-client[weights]"': lambda: [*compressed([b"a"])],
        'Sending torch tensors needs torch: pip install "rollout-client[torch]"': lambda: full_weights({}, nothing),
    }
    for sentence, need in needs.items():
        with pytest.raises(ModuleNotFoundError, match=whole(sentence)):
            need()
