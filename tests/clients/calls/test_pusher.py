"""Pushing a model again and again: what changed where that is smaller, bit for bit what the trainer has."""

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from tenacity import wait_none

from rollout_client import (
    AsyncPolicyPusher,
    AsyncRolloutClient,
    PolicyPusher,
    RequestRejected,
    RolloutClient,
    WeightsDiffer,
)
from rollout_client.contract.policy import PushResult
from rollout_client.weights.checksum import file_checksum
from rollout_client.weights.safetensors_file import header_bytes, read_header
from tests.clients.scripted_policy import CUT, PolicyServer, ScriptedPolicy
from tests.clients.weights.applied_deltas import apply_delta

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


def push_async(url: str, pushed: list[State], **options: Any) -> list[PushResult]:
    async def push() -> list[PushResult]:
        async with AsyncRolloutClient(url, retries=0) as client:
            pusher = AsyncPolicyPusher(client, **options)
            return [await pusher.push(state) for state in pushed]

    return asyncio.run(push())


@pytest.fixture(params=[push_sync, push_async], ids=["sync", "async"])
def push(request: pytest.FixtureRequest) -> Push:
    chosen: Push = request.param
    return chosen


class Service(ScriptedPolicy):
    """Applies deltas to what it has, as the service does, and says the checksum of what came out."""

    def __init__(self, folder: Path) -> None:
        super().__init__(layout=dict(LAYOUT))
        self.folder = folder
        self.checksum_of = lambda version, content: file_checksum(self.file(version)) if content else None
        self.damaged: set[int] = set()

    def file(self, version: int) -> Path:
        """Full weights of `version`."""
        path = self.folder / f"{version}.safetensors"
        if path.exists():
            return path
        content = self.content(version)
        kinds = {put.version: put.query for put in self.puts}
        if kinds[version]["kind"] != "delta":
            path.write_bytes(content)
            return path
        delta = self.folder / "delta.safetensors"
        delta.write_bytes(content)
        base = self.file(int(kinds[version]["base"]))
        header = read_header(base)
        tensors = b"".join(bytes(data) for _, data in apply_delta(base, delta))
        if version in self.damaged:
            tensors = b"\x01" + tensors[1:]
        path.write_bytes(header_bytes(header.entries, header.metadata) + tensors)
        return path

    def weights(self, version: int) -> State:
        tensors: State = load(self.file(version).read_bytes())
        return tensors

    @property
    def kinds(self) -> list[str]:
        return [put.query["kind"] for put in self.puts]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Service]:
    monkeypatch.setattr("rollout_client.retry.BACKOFF", wait_none())
    service = Service(tmp_path)
    with PolicyServer(service):
        yield service


@contextmanager
def pusher_that_pushed(service: Service, state: State) -> Iterator[PolicyPusher]:
    with RolloutClient(service.url, retries=0) as client:
        pusher = PolicyPusher(client)
        pusher.push(state)
        yield pusher


def holds(service: Service, version: int, state: State) -> bool:
    return save(service.weights(version)) == save(in_wire_dtypes(state))


def test_full_weights_come_first_and_then_what_changed(service: Service, push: Push) -> None:
    pushed = states(4)
    updates = push(service.url, pushed)
    assert [update.version for update in updates] == [1, 2, 3, 4]
    assert service.kinds == ["full", "delta", "delta", "delta"]
    assert [put.query.get("base") for put in service.puts] == [None, "1", "2", "3"]
    assert [put.query["checksum"] for put in service.puts] == [update.checksum for update in updates]
    assert [update.sent_bytes for update in updates] == [len(put.body) for put in service.puts]
    assert all(holds(service, version, state) for version, state in enumerate(pushed, start=1))
    assert len(service.versions[2]) < len(service.versions[1]) / 2


def test_of_partial_weights_only_those_and_then_what_changed_of_them_are_sent(service: Service, push: Push) -> None:
    trained = [{"embed.weight": state["embed.weight"]} for state in states(3)]
    push(service.url, trained, is_partial=True)
    assert service.kinds == ["partial", "delta", "delta"]
    assert [put.query.get("base") for put in service.puts] == [None, "1", "2"]
    assert not any("checksum" in put.query for put in service.puts)
    for version, state in enumerate(trained, start=1):
        assert save(service.weights(version)) == save({"embed.weight": state["embed.weight"].bfloat16()})


def test_weights_that_did_not_change_are_an_empty_delta(service: Service, push: Push) -> None:
    [state] = states(1)
    push(service.url, [state, state])
    assert service.kinds == ["full", "delta"]
    assert load(service.content(2)) == {}


def test_a_delta_that_is_not_smaller_is_full_weights_and_the_next_one_builds_on_them(
    service: Service, push: Push
) -> None:
    first, second, third = states(3)
    other = {name: tensor + 1 for name, tensor in second.items()}
    changed = {name: tensor.clone() for name, tensor in other.items()} | {"norm.weight": third["norm.weight"]}
    push(service.url, [first, other, changed])
    assert service.kinds == ["full", "full", "delta"]
    assert holds(service, 2, other)
    assert holds(service, 3, changed)


def test_a_model_in_the_dtype_of_the_wire_may_change_after_it_was_taken(service: Service) -> None:
    first, second = ({name: t.clone() for name, t in in_wire_dtypes(state).items()} for state in states(2))
    kept = [{name: tensor.clone() for name, tensor in state.items()} for state in (first, second)]
    with RolloutClient(service.url) as client:
        pusher = PolicyPusher(client)
        for state in (first, second):
            captured = pusher.capture(state)
            for tensor in state.values():
                tensor.zero_()
            pusher.send(captured)
    assert holds(service, 1, kept[0])
    assert holds(service, 2, kept[1])


def test_a_pusher_keeps_the_result_of_its_last_push_whose_seconds_include_finding_what_changed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_full_weights_come_again_where_the_base_is_not_what_it_was(service: Service) -> None:
    first, second = states(2)
    with pusher_that_pushed(service, first) as pusher:
        service.file(1).write_bytes(save({"embed.weight": torch.ones(1)}))
        pusher.push(second)
    assert service.kinds == ["full", "full"]


def test_a_push_that_failed_leaves_the_base_and_the_next_one_changes_it(service: Service) -> None:
    first, second, third = states(3)
    with pusher_that_pushed(service, first) as pusher:
        service.script.append(CUT)
        with pytest.raises(Exception, match="cannot be reached"):
            pusher.push(second)
        assert pusher.push(third).version == 2
    assert service.kinds == ["full", "delta", "delta"]
    assert holds(service, 2, third)


def test_full_weights_come_after_a_delta_that_was_refused(service: Service) -> None:
    first, second = states(2)
    with pusher_that_pushed(service, first) as pusher:
        service.script.append((422, {}))
        with pytest.raises(RequestRejected):
            pusher.push(second)
        pusher.push(second)
    assert service.kinds == ["full", "delta", "full"]
    assert holds(service, 2, second)


def test_a_service_that_ends_up_with_other_weights_is_an_error_and_gets_full_ones_next(service: Service) -> None:
    first, second, third = states(3)
    service.damaged.add(2)
    with pusher_that_pushed(service, first) as pusher:
        with pytest.raises(WeightsDiffer, match=r"^Version 2 has checksum \w{64} at the service and \w{64} here: "):
            pusher.push(second)
        pusher.push(third)
    assert service.kinds == ["full", "delta", "full"]
    assert holds(service, 3, third)


def test_checksums_are_made_only_where_they_are_asked_for(service: Service, push: Push) -> None:
    service.damaged.add(2)
    assert len(push(service.url, states(2), is_verified=False)) == 2
    assert ["checksum" in put.query for put in service.puts] == [False, False]


@pytest.mark.slow
def test_what_is_missing_is_named_with_the_extra_that_brings_it() -> None:
    program = """
        import sys
        sys.modules.update(dict.fromkeys(["numpy", "zstandard", "torch"]))
        import rollout_client
        from rollout_client.calls.upload import compressed
        with rollout_client.RolloutClient() as client:
            for needs in (
                lambda: rollout_client.PolicyPusher(client),
                lambda: list(compressed([b"a"])),
                lambda: rollout_client.weights.sources.full_weights({}, None),
            ):
                try:
                    needs()
                except ModuleNotFoundError as error:
                    sys.stderr.write(f"{error}\\n")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.stderr == (
        'PolicyPusher needs numpy: pip install "rollout-client[weights]"\n'
        'Compressing weights needs zstandard: pip install "rollout-client[weights]"\n'
        'Sending torch tensors needs torch: pip install "rollout-client[torch]"\n'
    )
