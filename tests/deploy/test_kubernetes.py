"""The files for Kubernetes against the published schemas, and against what they repeat of the repository."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from dotenv import dotenv_values
from jsonschema_rs import Draft202012Validator

from service.settings import ServiceSettings
from tests.paths import REPOSITORY

FOLDER = REPOSITORY / "deploy" / "kubernetes"
KUSTOMIZATIONS = (FOLDER, FOLDER / "redis")
RAY_SERVICE_SCHEMA = Path(__file__).parent / "schemas" / "rayservice.json"
OLDEST_KUBERNETES = "1.30"
SECRETS = {"rollout-keys", "rollout-redis", "rollout-hub"}
"""Those that docs/deploy.md has its reader make."""


def resources() -> Iterator[dict[str, Any]]:
    for folder in KUSTOMIZATIONS:
        for name in kustomization(folder)["resources"]:
            yield from yaml.safe_load_all((folder / name).read_text())


def kustomization(folder: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return parsed


RESOURCES = {f"{resource['kind']} {resource['metadata']['name']}": resource for resource in resources()}
RAY_SERVICE = RESOURCES["RayService rollout"]["spec"]
CLUSTER = RAY_SERVICE["rayClusterConfig"]
POD_TEMPLATES = {
    "head": CLUSTER["headGroupSpec"]["template"],
    **{group["groupName"]: group["template"] for group in CLUSTER["workerGroupSpecs"]},
    "redis": RESOURCES["StatefulSet rollout-redis"]["spec"]["template"],
}
NODES = {name: template for name, template in POD_TEMPLATES.items() if name != "redis"}
SERVED = yaml.safe_load(RAY_SERVICE["serveConfigV2"])


def closed(schema: Any) -> Any:
    """The schema of a custom resource, which refuses what Kubernetes would drop without a word."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    rest = {key: closed(value) for key, value in schema.items() if key != "properties"}
    if not isinstance(properties, dict):
        return rest
    rest["properties"] = {name: closed(value) for name, value in properties.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    return rest if is_open else {**rest, "additionalProperties": False}


def problems_of_ray_service(resource: dict[str, Any]) -> list[str]:
    schema = closed(json.loads(RAY_SERVICE_SCHEMA.read_text()))
    # Kubernetes has a schema of its own for it.
    schema["properties"]["metadata"] = {"type": "object"}
    errors = Draft202012Validator(schema).iter_errors(resource)
    return [f"{'.'.join(map(str, error.instance_path))}: {error.message}" for error in errors]


@pytest.mark.parametrize("name", RESOURCES)
def test_a_resource_is_as_its_schema_says(name: str) -> None:
    resource = RESOURCES[name]
    if resource["kind"] == "RayService":
        assert problems_of_ray_service(resource) == []
    else:
        kubernetes_validate.validate(resource, OLDEST_KUBERNETES, strict=True)


def test_every_node_has_the_variables_of_serve_env() -> None:
    assert RESOURCES["ConfigMap ray-environment"]["data"] == dotenv_values(REPOSITORY / "serve.env")
    for template in NODES.values():
        [container] = template["spec"]["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": "ray-environment"}}]


def test_the_config_is_the_shipped_one_with_paths_and_redis() -> None:
    ServiceSettings.model_validate(SERVED["applications"][0]["args"])
    expected = yaml.safe_load((REPOSITORY / "serve_config.yaml").read_text())
    redis = {"redis_url": "redis://rollout-redis:6379/0", "redis_password_file": "/etc/rollout/redis/password"}
    expected["http_options"]["host"] = "0.0.0.0"
    args = expected["applications"][0]["args"]
    args |= {"access": {"keys_file": "/etc/rollout/keys/keys.yaml"}, "jobs": redis, "sessions": redis}
    args["policy"]["folder"] = "/var/lib/rollout/weights"
    assert expected == SERVED


@pytest.mark.parametrize("name", POD_TEMPLATES)
def test_a_pod_has_no_privileges_a_read_only_root_and_limits(name: str) -> None:
    pod = POD_TEMPLATES[name]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"]["cpu"]
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert not any("hostPath" in volume for volume in pod.get("volumes", ()))


@pytest.mark.parametrize("name", POD_TEMPLATES)
def test_what_a_pod_mounts_and_reads_exists(name: str) -> None:
    pod = POD_TEMPLATES[name]["spec"]
    claims = {resource["metadata"]["name"] for resource in RESOURCES.values() if resource["kind"].endswith("Claim")}
    volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
    for volume in volumes.values():
        assert volume.get("persistentVolumeClaim", {}).get("claimName", "rollout-weights") in claims
        assert volume.get("secret", {}).get("secretName", "rollout-keys") in SECRETS
    own = {"data"} if name == "redis" else set()
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys() | own
        sources = [variable["valueFrom"] for variable in container["env"] if "valueFrom" in variable]
        assert {source["secretKeyRef"]["name"] for source in sources} <= SECRETS
