"""Checks that the tensors of a source are those of the service's model, and names every one that is not."""

from collections.abc import Mapping
from typing import TypeVar

from rollout_client.policy_contract import PolicyLayout, TensorLayout
from rollout_client.weights.tensor import SourceTensor

T = TypeVar("T", bound=SourceTensor)
CASTABLE = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that are cast into each other. Narrower floating dtypes need scales, which a cast does not compute."""
MAX_SHOWN_NAMES = 5


class WeightsDoNotFit(ValueError):
    """The tensors are not those of the model that the service serves; nothing was sent.

    Args:
        missing: names that the service requires and the source lacks.
        extra: names that the service does not have, except tied ones: second names of a tensor that it has.
        wrong: what is wrong with a tensor of another shape or dtype, by name.
    """

    def __init__(self, missing: list[str], extra: list[str], wrong: dict[str, str]) -> None:
        super().__init__(
            "The weights are not those of the model that the service serves; nothing was sent."
            + finding("Missing", missing)
            + finding("Not known there", extra)
            + finding("Different", [f"{name} {how}" for name, how in wrong.items()])
        )
        self.missing = missing
        self.extra = extra
        self.wrong = wrong


def finding(title: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
    return f" {title}: {', '.join(names[:MAX_SHOWN_NAMES])}{more}."


def fitted(tensors: Mapping[str, T], layout: PolicyLayout, is_partial: bool = False) -> dict[str, T]:
    """The tensors that `layout` names, in the order of the source.

    Args:
        is_partial: tensors of `layout` may be missing.

    Raises:
        WeightsDoNotFit: a name, shape or dtype differs.
    """
    sent = {name: tensor for name, tensor in tensors.items() if name in layout.tensors}
    missing = [] if is_partial else [name for name in layout.tensors if name not in tensors]
    wrong = {
        name: how for name, tensor in sent.items() if (how := difference(tensor, layout.tensors[name])) is not None
    }
    extra = [name for name in tensors if name not in sent]
    if not missing and not wrong:
        # Comparing two tensors may read them, so it is done only where everything else fits.
        extra = [name for name in extra if not is_tied(tensors[name], sent)]
    if missing or extra or wrong:
        raise WeightsDoNotFit(missing, extra, wrong)
    return sent


def difference(tensor: SourceTensor, layout: TensorLayout) -> str | None:
    if tensor.shape != tuple(layout.shape):
        return f"has shape {list(tensor.shape)} instead of {layout.shape}"
    if tensor.dtype != layout.dtype and not {tensor.dtype, layout.dtype} <= CASTABLE:
        return f"is {tensor.dtype} instead of {layout.dtype}"
    return None


def is_tied(tensor: SourceTensor, sent: Mapping[str, SourceTensor]) -> bool:
    return any(tensor.shape == other.shape and tensor.is_tied_to(other) for other in sent.values())
