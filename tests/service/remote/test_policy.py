"""The policy as an ingress replica knows it, over a scripted store."""

import asyncio
import logging
from typing import Any

import pytest

from deployments.failures import PolicyStoreLost
from deployments.protocols.weight_versions import CurrentVersions, RollingActivation
from rollout_client.contract.base import PolicyDemand
from service.remote.policy import RETRY_WATCH_AFTER_S, RemotePolicy
from tests import virtual_time

LOST = PolicyStoreLost("The policy store died during the call.")


class ScriptedStore:
    """`watch` answers each second with the next version of its script, or raises it, and then never again."""

    def __init__(self, *watched: int | Exception, current: int = 0) -> None:
        self._watched = list(watched)
        self._current = current
        self.seen: list[tuple[float, int | None]] = []
        self.waited_for: list[tuple[Any, ...]] = []

    async def watch(self, seen: CurrentVersions | None) -> CurrentVersions:
        self.seen.append((virtual_time.now(), None if seen is None else seen.versions[""]))
        await asyncio.sleep(1 if self._watched else 3600)
        result = self._watched.pop(0)
        if isinstance(result, Exception):
            raise result
        return versions_at(result)

    async def wait_for(self, name: str | None, *demand: Any, takes_offered: bool = False) -> CurrentVersions:
        del takes_offered
        self.waited_for.append((name, *demand))
        return CurrentVersions("store", 100, {name or "": self._current})


async def followed(policy: RemotePolicy, seconds: float) -> None:
    watching = asyncio.create_task(policy.run())
    await asyncio.sleep(seconds)
    watching.cancel()


def versions_at(version: int, revision: int | None = None, **named: int) -> CurrentVersions:
    """An answer of the store; by default that with the higher version is the later one."""
    return CurrentVersions("store", version if revision is None else revision, {"": version, **named})


def policy_over(store: ScriptedStore, version: int | None = None, **options: Any) -> RemotePolicy:
    unchecked: Any = store
    policy = RemotePolicy(unchecked, **options)
    if version is not None:
        policy.note(versions_at(version))
    return policy


async def test_a_followed_policy_knows_each_new_version_and_asks_for_the_next() -> None:
    store = ScriptedStore(0, 4)

    policy = policy_over(store)
    watching = asyncio.create_task(policy.run())
    known = []
    for _ in range(3):
        await asyncio.sleep(0.75)
        known.append(policy.version)
    watching.cancel()
    assert known == [None, 0, 4]
    assert store.seen == [(0.0, None), (1.0, 0), (2.0, 4)]


async def test_a_lost_store_is_watched_again_after_a_pause_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = ScriptedStore(LOST, LOST, 5, LOST)
    policy = policy_over(store)
    await followed(policy, 6)
    assert policy.version == 5
    again = 1 + RETRY_WATCH_AFTER_S
    assert store.seen == [(0.0, None), (again, None), (2 * again, None), (2 * again + 1, 5), (3 * again + 1, 5)]
    said = ("WARNING", f"The policy store cannot be watched, retrying: {LOST}", None)
    assert [(record.levelname, record.getMessage(), record.exc_info) for record in caplog.records] == [said] * 2


async def test_a_watch_that_fails_in_any_way_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    failure = ValueError("a version that cannot be read")
    policy = policy_over(ScriptedStore(3, failure, failure, 5))
    await followed(policy, 6)
    assert policy.version == 5
    [record] = caplog.records
    assert (record.levelname, record.exc_info is None) == ("ERROR", False)


async def test_a_subscriber_that_fails_keeps_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: int | None) -> None:
        raise ValueError("closed")

    heard = list[int | None]()
    policy = policy_over(ScriptedStore(3, 4))
    policy.subscribe(fail)
    policy.subscribe(heard.append)
    await followed(policy, 3)
    assert heard == [3, 4]
    messages = [f"A subscriber did not take version {version} of the policy without a name." for version in (3, 4)]
    assert [record.getMessage() for record in caplog.records] == messages


@pytest.mark.parametrize("known", [None, 3])
def test_subscribers_hear_the_known_version_and_each_new_one(known: int | None) -> None:
    policy = policy_over(ScriptedStore(), known)
    heard = list[int | None]()
    unsubscribe = policy.subscribe(heard.append)
    for version in (3, 4, 4, 6):
        policy.note(versions_at(version))
    unsubscribe()
    unsubscribe()
    policy.note(versions_at(7))
    assert heard == [3, 4, 6]


@pytest.mark.parametrize(("known", "asked"), [(None, [(None, 0, None, None)]), (3, [])])
def test_the_current_version_is_asked_for_only_if_it_is_not_known(known: int | None, asked: list[Any]) -> None:
    store = ScriptedStore(current=9)
    policy = policy_over(store, known)
    virtual_time.run(policy.learn_version())
    assert (store.waited_for, policy.version) == (asked, 9 if known is None else known)


@pytest.mark.parametrize(
    ("name", "known", "demand", "asked"),
    [
        (None, {}, {}, None),
        (None, {"": 3}, {"min_version": 3}, None),
        (None, {"": 2}, {"min_version": 3, "wait_s": 7.0}, (None, 3, None, 7.0)),
        (None, {"": 3}, {"version": 3}, (None, 0, 3, None)),
        ("b", {"": 3}, {}, ("b", 0, None, None)),
        ("b", {"": 3, "b": 7}, {}, None),
        ("b", {"": 3, "b": 7}, {"min_version": 8, "wait_s": 5.0}, ("b", 8, None, 5.0)),
        ("b", {"": 3, "b": 7}, {"version": 7}, ("b", 0, 7, None)),
        ("b", {"": 3, "a": 7}, {}, ("b", 0, None, None)),
    ],
)
def test_a_policy_that_is_known_to_be_current_enough_costs_no_call(
    name: str | None, known: dict[str, int], demand: dict[str, Any], asked: tuple[Any, ...] | None
) -> None:
    store = ScriptedStore(current=9)
    policy = policy_over(store)
    if known:
        policy.note(CurrentVersions("store", 1, known))
    virtual_time.run(policy.wait_for_version(PolicyDemand(name=name, **demand)))
    assert store.waited_for == ([asked] if asked else [])
    assert policy.current(name) == (9 if asked else known.get(name or ""))


def test_subscribers_of_a_name_hear_its_versions_and_when_it_is_dropped() -> None:
    policy = policy_over(ScriptedStore())
    heard: dict[str | None, list[int | None]] = {None: [], "a": [], "b": []}
    for name, versions in heard.items():
        policy.subscribe(versions.append, name)
    for revision, current in enumerate(({"a": 1}, {"a": 1, "b": 5}, {"a": 2}, {"a": 2, "b": 6})):
        policy.note(versions_at(3, 4 + revision, **current))
    policy.note(versions_at(4, 9, a=2, b=6))
    assert heard == {None: [3, 4], "a": [1, 2], "b": [5, None, 6]}


def test_an_overtaken_answer_is_ignored() -> None:
    policy = policy_over(ScriptedStore())
    policy.note(versions_at(3, 5, a=2))
    policy.note(versions_at(3, 4))
    assert policy.current("a") == 2
    policy.note(CurrentVersions("another store", 1, {}))
    assert policy.current("a") is None


def rolling(revision: int, version: int | None) -> CurrentVersions:
    """Version 7 is current, and `version` is being activated."""
    under_way = None if version is None else RollingActivation(version - 1, version, frozenset("a"))
    return CurrentVersions("store", revision, {"": 7}, under_way)


def test_served_is_also_the_version_that_one_replica_has_already() -> None:
    policy = policy_over(ScriptedStore(), 7)
    policy.note(versions_at(7, 8, tutor=3))
    assert policy.served_versions == {"": 7, "tutor": 3}
    policy.note(rolling(9, 8))
    assert (policy.served_versions, policy.known_versions) == ({"": 8}, {"": 7})


def test_a_minimum_that_one_replica_has_already_costs_no_call() -> None:
    store = ScriptedStore(current=9)
    policy = policy_over(store, 7)
    policy.note(rolling(8, 8))
    virtual_time.run(policy.wait_for_version(PolicyDemand(min_version=8)))
    assert store.waited_for == []
    for demand in (PolicyDemand(version=8), PolicyDemand(min_version=10)):
        virtual_time.run(policy.wait_for_version(demand))
    assert [waited[1:3] for waited in store.waited_for] == [(0, 8), (10, None)]


def test_each_change_of_a_rolling_activation_is_told_once() -> None:
    told: list[int | None] = []

    def on_rolling(under_way: RollingActivation | None) -> None:
        told.append(None if under_way is None else under_way.version)

    policy = policy_over(ScriptedStore(), on_rolling=on_rolling)
    for revision, version in enumerate((None, 8, 8, None, None), start=1):
        policy.note(rolling(revision, version))
    assert told == [8, None]
