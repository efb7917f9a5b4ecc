"""Weights on a cluster of several nodes, which are on one machine: fetched once a node."""

import hashlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.live.cluster_programs import findings_of
from tests.live.mapped_generators import REPLICAS_PER_NODE

TIMEOUT_S = 240
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def findings(folder: Path) -> dict[str, Any]:
    return findings_of("tests.live.weights_on_nodes", str(folder), timeout_s=TIMEOUT_S)


def by_node(held: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    nodes = defaultdict(list)
    for replica in held:
        nodes[replica["node_id"]].append(replica)
    return nodes


def test_a_push_reaches_replicas_on_both_nodes_and_each_node_maps_one_file(findings: dict[str, Any]) -> None:
    nodes = by_node(findings["held"])
    assert [len(replicas) for replicas in nodes.values()] == [REPLICAS_PER_NODE] * 2
    assert [len({replica["inode"] for replica in replicas}) for replicas in nodes.values()] == [1, 1]
    assert len({replica["sha256"] for replica in findings["held"]}) == 1
    assert {replica["version"] for replica in findings["held"]} == {len(findings["updates"])}


def test_another_node_fetches_a_version_once_and_the_stores_node_never(findings: dict[str, Any]) -> None:
    for update in findings["updates"]:
        assert [replica["status"] for replica in update] == ["swapped"] * 2 * REPLICAS_PER_NODE
        fetched = sorted(replica["fetched_bytes"] for replica in update)
        assert fetched == [0] * (2 * REPLICAS_PER_NODE - 1) + [findings["size_bytes"]]


def test_replicas_of_a_late_node_fetch_from_replicas_that_serve(findings: dict[str, Any], folder: Path) -> None:
    late = by_node(findings["held_late"])
    assert [len(replicas) for replicas in late.values()] == [REPLICAS_PER_NODE] * 3
    assert len({replica["sha256"] for replica in findings["held_late"]}) == 1
    stored = folder / "policy" / "versions" / f"{len(findings['updates'])}.safetensors"
    assert hashlib.sha256(stored.read_bytes()).hexdigest() == findings["held_late"][0]["sha256"]
    assert load_file(stored)["weight"][0].item() == len(findings["updates"])
