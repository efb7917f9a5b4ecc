"""The running service behind keys and TLS, and how it refuses to be reached by strangers."""

import datetime
import ipaddress
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

import service.startup.local_service
from rollout_client import RequestRejected, RolloutClient
from service.access.keys import new_key
from service.access.new_key import _add, _entry_of
from service.startup.config import ServiceNotStarted, free_port, read_config
from service.startup.local_service import local_service
from tests.paths import REPOSITORY, SIMULATED_REPLICA


def simulated_config() -> ServeDeploySchema:
    """The example config with a simulated engine and one task."""
    config = read_config(REPOSITORY / "serve_config.cpu.yaml", port=free_port())
    [application] = config.applications
    application.args["engine"] = {"device": "cpu", "model": "models/tiny", "max_model_len": 4096, "num_cpus": 0.1}
    application.args["engine"] |= {"replica": SIMULATED_REPLICA, "simulated": {"max_num_seqs": 64}}
    del application.args["environments"]["sliding_puzzle"]
    application.deployments = [entry for entry in application.deployments if entry.name != "sliding_puzzle"]
    return config


class Certificate:
    """A certificate for 127.0.0.1 that is its own authority."""

    def __init__(self, folder: Path) -> None:
        private = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        today = datetime.datetime.now(datetime.UTC)
        built = (
            x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
            .not_valid_before(today - datetime.timedelta(days=1))
            .not_valid_after(today + datetime.timedelta(days=1))
            .add_extension(address, critical=False)
            .sign(private, hashes.SHA256())
        )
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))
        self.key.write_bytes(
            private.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )


class KeyedService:
    """A running service with TLS, and its keys by name."""

    def __init__(self, url: str, keys_file: Path, trusted: ssl.SSLContext, keys: dict[str, str]) -> None:
        self.url = url
        self.keys_file = keys_file
        self.trusted = trusted
        self.keys = keys

    def client(self, name: str) -> RolloutClient:
        return RolloutClient(
            self.url, api_key=self.keys[name], retries=0, http_client=httpx.Client(verify=self.trusted, trust_env=False)
        )

    def status_with(self, name: str) -> int:
        with self.client(name) as client:
            try:
                client.info()
            except RequestRejected as error:
                return error.status
        return 200

    def until_status(self, name: str, status: int) -> None:
        until = time.monotonic() + 60
        while self.status_with(name) != status and time.monotonic() < until:
            time.sleep(0.1)
        assert self.status_with(name) == status


def added_key(file: Path, name: str, *scopes: str) -> str:
    key = new_key()
    _add(_entry_of(name, key, list(scopes)), file)
    return key


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedService]:
    folder = tmp_path_factory.mktemp("keys")
    certificate, keys_file = Certificate(folder), folder / "keys.yaml"
    keys = {
        "trainer": added_key(keys_file, "trainer", "rollout", "read"),
        "reader": added_key(keys_file, "reader", "read"),
    }
    config = simulated_config()
    config.applications[0].args["access"] = {"keys_file": str(keys_file)}
    config.http_options.host = "0.0.0.0"
    config.http_options.ssl_certfile, config.http_options.ssl_keyfile = map(
        str, (certificate.certificate, certificate.key)
    )
    with local_service(config, Console(stderr=True)) as url:
        yield KeyedService(url, keys_file, ssl.create_default_context(cafile=str(certificate.certificate)), keys)


@pytest.mark.long
def test_strangers_are_not_served_whoever_deploys_the_service() -> None:
    """`serve run` deploys a config without the checks of `python -m service`."""
    config = simulated_config()
    config.http_options.host = "0.0.0.0"
    with (
        patch.object(service.startup.local_service, "check_config"),
        pytest.raises(ServiceNotStarted, match=r"can be reached from other machines, and the service asks for no key"),
        local_service(config, Console(stderr=True)),
    ):
        pass


def test_a_key_plays_over_tls_and_another_one_only_reads(keyed: KeyedService) -> None:
    assert keyed.url.startswith("https://127.0.0.1:")
    with keyed.client("trainer") as trainer:
        samples = trainer.example_samples("math", count=2)
        assert [sample.status for sample in trainer.rollout(samples, max_rollout_turns=1).samples] == ["completed"] * 2
    with keyed.client("reader") as reader:
        assert reader.info().tasks == ["math"]
        with pytest.raises(RequestRejected) as rejected:
            reader.rollout(samples)
    assert (rejected.value.status, rejected.value.problem.type) == (403, "urn:rollout:problem:not-allowed")


def test_without_a_key_the_running_service_tells_nothing_but_that_it_lives(keyed: KeyedService) -> None:
    with httpx.Client(base_url=keyed.url, verify=keyed.trusted, trust_env=False) as stranger:
        statuses = {
            path: stranger.get(path).status_code for path in ("/info", "/tasks", "/policy", "/healthz", "/readyz")
        }
        assert statuses == {"/info": 401, "/tasks": 401, "/policy": 401, "/healthz": 200, "/readyz": 200}
        assert stranger.post("/rollout", json={}).headers["www-authenticate"] == 'Bearer realm="rollout"'


def test_the_port_speaks_no_http_without_tls(keyed: KeyedService) -> None:
    with httpx.Client(trust_env=False) as plain, pytest.raises(httpx.HTTPError):
        plain.get(keyed.url.replace("https://", "http://") + "/healthz")


def test_a_key_is_rotated_while_the_service_runs(keyed: KeyedService) -> None:
    old = keyed.keys_file.read_text()
    keyed.keys["new"] = added_key(keyed.keys_file, "trainer", "rollout", "read")
    keyed.until_status("new", 200)
    assert keyed.status_with("trainer") == 200
    added = keyed.keys_file.read_text().removeprefix(old)
    keyed.keys_file.write_text(f"keys:\n{added}")
    keyed.until_status("trainer", 401)
    assert [keyed.status_with(name) for name in ("new", "reader")] == [200, 401]
