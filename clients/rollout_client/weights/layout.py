"""Maps the names of a source's tensors to those of the service's model; rejects sources that do not fit it."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TypeVar

from rollout_client.contract.policy import PolicyLayout, TensorLayout
from rollout_client.weights.safetensors_file import SourceTensor

T = TypeVar("T", bound=SourceTensor)
CASTABLE = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that are cast into each other. Narrower floating dtypes need scales, which a cast does not compute."""
MAX_SHOWN_NAMES = 5
WRAPPERS = re.compile(
    r"^(?:(?:module|base_model\.model|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.)+"
    r"|(?<=\.)(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
"""Parts that DDP, PEFT, torch.compile, activation checkpointing and FSDP add to names: all of them in front, in any
order, the last three inside too, where `module` is an ordinary name."""
TEXT_MODELS = ("model.language_model.", "language_model.model.", "model.")
"""Prefixes of the text model's layers: in a model with images, in some of its checkpoints, and without images."""


class WeightsDoNotFit(ValueError):
    """The tensors are not those of the model that the service serves; nothing was sent.

    Args:
        missing: names that the service requires and the source lacks.
        extra: names that the service does not have, except tied ones: second names of a tensor that it has.
        wrong: the difference of a tensor in shape or dtype, by name.
    """

    def __init__(self, missing: list[str], extra: list[str], wrong: dict[str, str]) -> None:
        super().__init__(
            "The weights are not those of the model that the service serves; nothing was sent."
            + _finding("Missing", missing)
            + _finding("Not known there", extra)
            + _finding("Different", [f"{name} {how}" for name, how in wrong.items()])
        )
        self.missing = missing
        self.extra = extra
        self.wrong = wrong


def _finding(title: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
    return f" {title}: {', '.join(names[:MAX_SHOWN_NAMES])}{more}."


def names_in_model(names: Iterable[str], model: Container[str]) -> dict[str, str]:
    """For each name of a source's tensor the name that `model` has for it, or itself if `model` has none.

    Names of the model are kept. Others are compared without the parts of wrappers, and with the other prefixes of the
    text model. No two get the same name: of `module.x` beside `x` the first stays unknown to the model.
    """
    names = list(names)
    found = {name: name for name in names if name in model}
    taken = set(found)
    for name in names:
        if name not in found:
            found[name] = next((each for each in _aliases(name) if each in model and each not in taken), name)
            taken.add(found[name])
    return found


def _aliases(name: str) -> Iterator[str]:
    """The names that the same tensor may have in a model that is not wrapped."""
    plain = WRAPPERS.sub("", name)
    yield plain
    for prefix in TEXT_MODELS:
        if plain.startswith(prefix):
            yield from (other + plain.removeprefix(prefix) for other in TEXT_MODELS if other != prefix)


def fitted(tensors: Mapping[str, T], layout: PolicyLayout, is_partial: bool = False) -> dict[str, T]:
    """The tensors that `layout` names, under its names (see `names_in_model`), in the order of the source.

    Args:
        is_partial: tensors of `layout` may be missing.

    Raises:
        WeightsDoNotFit: a name, shape or dtype differs.
    """
    names = names_in_model(tensors, layout.tensors)
    tensors = {names[name]: tensor for name, tensor in tensors.items()}
    sent = {name: tensor for name, tensor in tensors.items() if name in layout.tensors}
    missing = [] if is_partial else [name for name in layout.tensors if name not in tensors]
    wrong = {
        name: how for name, tensor in sent.items() if (how := _difference(tensor, layout.tensors[name])) is not None
    }
    extra = [name for name in tensors if name not in sent]
    if not missing and not wrong:
        # Comparing two tensors may read them, so it is done only where everything else fits.
        extra = [name for name in extra if not _is_tied(tensors[name], sent)]
    if missing or extra or wrong:
        raise WeightsDoNotFit(missing, extra, wrong)
    return sent


def _difference(tensor: SourceTensor, layout: TensorLayout) -> str | None:
    if tensor.shape != tuple(layout.shape):
        return f"has shape {list(tensor.shape)} instead of {layout.shape}"
    if tensor.dtype != layout.dtype and not {tensor.dtype, layout.dtype} <= CASTABLE:
        return f"is {tensor.dtype} instead of {layout.dtype}"
    return None


def _is_tied(tensor: SourceTensor, sent: Mapping[str, SourceTensor]) -> bool:
    return any(tensor.shape == other.shape and tensor.is_tied_to(other) for other in sent.values())
