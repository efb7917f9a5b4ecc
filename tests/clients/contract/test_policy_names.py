"""Labels of versions, and which names a policy can have."""

import pytest
from pydantic import TypeAdapter, ValidationError

from rollout_client.contract.base import PolicyName, VersionLabel, label_of, read_label
from rollout_client.contract.messages import WeightVersionSpan
from rollout_client.contract.policy import PolicyUpdate, PushOptions


@pytest.mark.parametrize(
    ("name", "number", "label"),
    [(None, 7, "7"), (None, 2**63 - 1, str(2**63 - 1)), ("run-b", 7, "run-b/7"), ("a.b_c", 10, "a.b_c/10")],
)
def test_a_label_says_the_name_and_the_number(name: str | None, number: int, label: str) -> None:
    assert (label_of(name, number), read_label(label)) == (label, VersionLabel(name, number))
    assert WeightVersionSpan(version=label, start=0, end=1).version == label


@pytest.mark.parametrize("label", ["", "a/", "/7", "7/7", "a/b/7", "-a/7", "run-b", "a/-7", "1" * 20, "9" * 5000])
def test_what_is_no_label_names_no_version(label: str) -> None:
    with pytest.raises(ValidationError):
        WeightVersionSpan(version=label, start=0, end=1)


@pytest.mark.parametrize("name", ["", "7", "-a", ".a", "a/b", "a b", "a" * 65])
def test_what_could_not_be_read_back_from_a_label_is_no_name(name: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(PolicyName).validate_python(name)


def test_an_update_of_a_named_policy_has_its_label() -> None:
    update = PolicyUpdate(version=7, checksum=None, replicas=[])
    assert (update.label, update.model_copy(update={"name": "run-b"}).label) == ("7", "run-b/7")


def test_only_an_adapter_is_pushed_with_a_name() -> None:
    assert PushOptions(kind="adapter", name="run-b").name == "run-b"
    with pytest.raises(ValidationError, match="name=run-b goes with kind=adapter, and the kind is full"):
        PushOptions(name="run-b")
