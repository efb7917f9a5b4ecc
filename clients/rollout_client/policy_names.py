"""The names of policies that are served beside the full weights, and the labels of versions: `7`, or `run-b/7`."""

from typing import Annotated, NamedTuple

from pydantic import Field

NAME = r"[A-Za-z][A-Za-z0-9._-]{0,63}"
LABEL = rf"^({NAME}/)?[0-9]+$"
PolicyName = Annotated[str, Field(pattern=f"^{NAME}$")]


class VersionLabel(NamedTuple):
    """A version of the policy `name`; of the one without a name, whose versions are mostly full weights, if `None`."""

    name: str | None
    number: int


def label_of(name: str | None, number: int) -> str:
    """What messages and answers call a version."""
    return str(number) if name is None else f"{name}/{number}"


def read_label(label: str) -> VersionLabel:
    """The inverse of `label_of`; raises `ValueError` if it is no label."""
    name, _, number = label.rpartition("/")
    return VersionLabel(name or None, int(number))
