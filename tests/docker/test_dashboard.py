"""The dashboard of Grafana: what its panels ask for."""

import json
import re
from typing import Any

import yaml

from tests.paths import REPOSITORY

OBSERVABILITY = REPOSITORY / "docker" / "observability"
DASHBOARD: dict[str, Any] = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "rollout.json").read_text())
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


def test_grafana_is_provisioned_with_the_source_that_its_panels_name() -> None:
    [source] = yaml.safe_load((OBSERVABILITY / "grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert {panel["datasource"]["uid"] for panel in PANELS} == {source["uid"]}
    [scraped] = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())["scrape_configs"]
    assert (scraped["metrics_path"], scraped["static_configs"]) == ("/metrics", [{"targets": ["rollout:8000"]}])


def test_grafana_finds_the_dashboard_where_it_is_mounted_and_opens_with_it() -> None:
    compose = yaml.safe_load((REPOSITORY / "docker" / "compose.yaml").read_text())
    grafana = compose["services"]["grafana"]
    mounted = dict(volume.removesuffix(":ro").split(":") for volume in grafana["volumes"])
    [provider] = yaml.safe_load((OBSERVABILITY / "grafana/provisioning/dashboards/rollout.yaml").read_text())[
        "providers"
    ]
    folder = provider["options"]["path"]
    assert mounted["./observability/grafana/dashboards"] == folder
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/rollout.json"
    # Grafana looks for both kinds of files below this folder.
    assert mounted["./observability/grafana/provisioning"] == "/etc/grafana/provisioning"
    [source] = yaml.safe_load((OBSERVABILITY / "grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert "prometheus" in compose["services"]
