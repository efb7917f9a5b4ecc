"""The dashboard of Grafana: what its panels ask for."""

import json
import re
from typing import Any

from tests.paths import REPOSITORY

FOLDER = REPOSITORY / "docker" / "observability" / "grafana" / "dashboards"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "rollout.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OPERATING = (REPOSITORY / "docs" / "operate.md").read_text()
PARTS = re.compile(r"_(bucket|sum|count)$")


def names_in(panel: dict[str, Any]) -> set[str]:
    return {name for target in panel["targets"] for name in re.findall(r"\bray_\w+", target["expr"])}


def test_the_dashboard_has_every_documented_metric_of_rollouts() -> None:
    documented = set(re.findall(r"^\| `(rollout_\w+)` \|", OPERATING, re.MULTILINE))
    asked = {PARTS.sub("", name.removeprefix("ray_")) for panel in PANELS for name in names_in(panel)}
    not_drawn = {
        "rollout_generations_not_finite",
        # Of services that keep records of rollouts alone.
        "rollout_records_dropped",
        # Of services whose trainers report log-probabilities alone.
        "rollout_mismatch_mean_ratio",
        "rollout_mismatch_causes",
        # Of services that follow a folder alone.
        "rollout_published_versions_refused",
        "rollout_published_versions_behind",
    }
    assert {name for name in asked if name.startswith("rollout_")} == documented - not_drawn
    assert not_drawn <= documented
