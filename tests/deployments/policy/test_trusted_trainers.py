"""Which trainers' addresses are taken from the config's list, and which address the replicas are told."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.policy.failures import TrainerNotTrusted
from deployments.policy.settings import TransferSettings
from deployments.policy.trusted_trainers import FORM, TrustedTrainers, _resolve_host
from rollout_client.contract.base import FieldProblem

NAMES = {
    "trainer": ["10.0.0.4"],
    "trainer-0.example": ["10.0.0.4"],
    "alias": ["fd00::4", "10.0.0.9", "10.0.0.4"],
    "moved": ["10.0.0.77"],
    "mapped": ["::ffff:10.0.0.4"],
}


class Resolver:
    """Resolves `NAMES`; counts how often it is asked for each."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        if name not in NAMES:
            raise OSError(f"{name} is not known")
        return NAMES[name]


def checked(listed: Sequence[str], address: Any, port: Any = 29500, **further: Any) -> dict[str, Any]:
    init_info = {"master_address": address, "master_port": port, **further}
    return asyncio.run(TrustedTrainers(listed, Resolver()).checked(init_info))


@pytest.mark.parametrize(
    ("listed", "address", "told"),
    [
        (["10.0.0.4:29500"], "10.0.0.4", "10.0.0.4"),
        (["10.0.0.4:29000-30000"], "10.0.0.4", "10.0.0.4"),
        (["192.168.0.1:1", "10.0.0.0/24:29500"], "10.0.0.4", "10.0.0.4"),
        (["10.0.0.4:29500"], "trainer", "10.0.0.4"),
        (["10.0.0.4:29500"], "alias", "10.0.0.4"),
        (["10.0.0.4:29500"], "::ffff:10.0.0.4", "10.0.0.4"),
        (["10.0.0.4:29500"], "mapped", "10.0.0.4"),
        (["trainer:29500"], "trainer", "10.0.0.4"),
        (["trainer-0.example:29500-29600"], "trainer-0.example", "10.0.0.4"),
        (["trainer:29500"], "10.0.0.4", "10.0.0.4"),
        (["alias:29500"], "alias", "10.0.0.4"),
        (["unknown:29500", "trainer:29500"], "10.0.0.4", "10.0.0.4"),
        (["[fd00::4]:29500"], "fd00:0::4", "fd00::4"),
        (["[fd00::/64]:29500"], "alias", "fd00::4"),
    ],
)
def test_a_listed_trainer_is_told_to_the_replicas_by_its_address(listed: list[str], address: str, told: str) -> None:
    further = {"world_size": 3, "packed": True}
    assert checked(listed, address, **further) == {"master_address": told, "master_port": 29500, **further}


@pytest.mark.parametrize(
    ("listed", "address", "port"),
    [
        ("10.0.0.4:29500", "10.0.0.5", 29500),
        ("10.0.0.4:29500", "10.0.0.4", 29501),
        ("10.0.0.4:29500-29510", "10.0.0.4", 29511),
        ("10.0.0.4:29500-29510", "10.0.0.4", 29499),
        ("10.0.0.0/24:29500", "10.0.1.4", 29500),
        ("10.0.0.4:29500", "moved", 29500),
        ("trainer:29500", "moved", 29500),
        ("trainer:29500", "10.0.0.77", 29500),
        ("unknown:29500", "10.0.0.4", 29500),
        ("10.0.0.4:29500", "fd00::4", 29500),
        ("10.0.0.4:29500", "0.0.0.0", 29500),
    ],
)
def test_a_trainer_that_is_not_listed_is_refused(listed: str, address: str, port: int) -> None:
    with pytest.raises(TrainerNotTrusted) as refused:
        checked([listed], address, port)
    message = f"{address}:{port} is not listed in policy.transfer.trainers of the service's config ({listed})"
    assert refused.value.problems == (FieldProblem(field="init_info.master_address", message=message, value=address),)


AT = {"master_address": "10.0.0.4"}
NO_PORT, UNRESOLVED = "the trainer's port, 1 to 65535, has to be given", "the service cannot resolve this host name"
HIDDEN = "it hides the trainer's address, which has to be checked; send master_address and master_port instead"


@pytest.mark.parametrize(
    ("init_info", "field", "message"),
    [
        ({}, "master_address", "the trainer's host name or IP address has to be given"),
        (AT, "master_port", NO_PORT),
        (AT | {"master_port": True}, "master_port", NO_PORT),
        ({"master_address": "nobody", "master_port": 29500}, "master_address", UNRESOLVED),
        (AT | {"nccl_unique_id_b64": "AA==", "master_port": 29500}, "nccl_unique_id_b64", HIDDEN),
    ],
)
def test_an_init_without_the_trainers_address_is_refused(init_info: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(TrainerNotTrusted) as refused:
        asyncio.run(TrustedTrainers(["10.0.0.4:1-65535"], Resolver()).checked(init_info))
    assert [(problem.field, problem.message) for problem in refused.value.problems] == [(f"init_info.{field}", message)]


def test_the_name_of_a_trainer_is_resolved_once() -> None:
    resolver = Resolver()
    trainers = TrustedTrainers(["10.0.0.1:29500", "10.0.0.2:29500", "10.0.0.4:29500"], resolver)
    told = asyncio.run(trainers.checked({"master_address": "trainer", "master_port": 29500}))
    assert (told["master_address"], resolver.asked) == ("10.0.0.4", ["trainer"])


def test_the_system_resolves_the_names_of_this_machine_and_no_others() -> None:
    assert "127.0.0.1" in asyncio.run(_resolve_host("localhost"))
    with pytest.raises(OSError, match=r"."):
        asyncio.run(_resolve_host("nobody.invalid"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10.0.0.4", f"'10.0.0.4' is not an address with a port: {FORM}"),
        ("fd00::4:29500", f"'fd00::4:29500' is not an address with a port: {FORM}"),
        ("10.0.0.4:0", f"the ports of '10.0.0.4:0' are not a range within 1-65535: {FORM}"),
        ("10.0.0.4:9-8", f"the ports of '10.0.0.4:9-8' are not a range within 1-65535: {FORM}"),
        ("10.0.0.4:65536", f"the ports of '10.0.0.4:65536' are not a range within 1-65535: {FORM}"),
        ("10.0.0.4/8:1", "10.0.0.4/8 has host bits set"),
        ("10.0.0.400:1", "'10.0.0.400' does not appear to be an IPv4 or IPv6 network"),
        ("*:1", f"'*' is neither a host name nor an address: {FORM}"),
    ],
)
def test_a_mistyped_entry_is_refused_when_the_config_is_read(text: str, message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TransferSettings(trainers=["10.0.0.4:29500", text])
    errors = [(error["loc"], error["msg"]) for error in refused.value.errors()]
    assert errors == [(("trainers",), f"Value error, {message}")]
