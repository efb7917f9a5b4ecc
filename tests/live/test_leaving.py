"""Nodes that are given notice while rollouts are played: all come back."""

from typing import Any

import pytest

from tests.live.cluster_programs import findings_of

ROUNDS = 20
TIMEOUT_S = 1200
pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S)]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("leaving")
    return findings_of("tests.live.leaving_nodes", str(folder), str(ROUNDS), timeout_s=TIMEOUT_S)


def test_no_rollout_is_lost_and_no_turn_is_done_twice(findings: dict[str, Any]) -> None:
    assert findings["rounds"] == ROUNDS
    assert (findings["lost"], findings["turns_done_again"], findings["errors"]) == (0, 0, [])


def test_generations_of_a_leaving_node_go_on_from_their_last_token(findings: dict[str, Any]) -> None:
    # Each turn has as many tokens as were asked for, or its rollout counts as lost.
    assert findings["moved"] >= ROUNDS
