"""Validation of weights: everything that makes them unfit to be served is found here, before a replica gets them.

No pickle is ever read. Memory holds one block of one tensor at a time, or of a delta the changes of one tensor. A delta
is checked against the layout, which all full weights of the model have; whether it makes the weights that its sender
says is found out by those who apply it.
"""

import json
import logging
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from deployments.policy.adapter_checks import adapter_problems
from deployments.policy.commands import DRAFT
from deployments.policy.failures import WeightsRefused
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.policy import PolicyLayout, TensorLayout
from rollout_client.weights.checksum import Checksum
from rollout_client.weights.delta import BadDelta, changed_places, delta_entries, read_changes
from rollout_client.weights.file_tensors import file_tensors, rank_problem
from rollout_client.weights.safetensors_file import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    Data,
    Header,
    NotSafetensors,
    header_of,
    read_header,
    tensor_blocks,
)

logger = logging.getLogger("rollout_service.policy")
MOST_SHOWN = 5
GAP_BYTES = 4
"""Size of the position of a changed value in a delta."""
EXPONENTS: dict[str, tuple[str, int]] = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),
    "F8_E8M0": ("<u1", 0xFF),
    "C64": ("<u4", 0x7F80_0000),
}
"""By dtype: the integer type to read its values as, and the bits that are all set only in NaN and infinity."""


def layout_of(checkpoint: Path, draft: Path | None = None) -> PolicyLayout:
    """The names, dtypes and shapes of a checkpoint's tensors.

    Args:
        draft: the checkpoint of the model that drafts; pushes cannot bring its weights if it has another format.

    Raises:
        NotSafetensors: the folder holds no such checkpoint.
    """
    layout = PolicyLayout(tensors=_tensors_of(checkpoint))
    if draft is not None:
        try:
            layout.draft = {f"{DRAFT}{name}": tensor for name, tensor in _tensors_of(draft).items()}
        except NotSafetensors as error:
            logger.warning("Pushes cannot bring the weights of the model that drafts: %s", error)
    return layout


def _tensors_of(checkpoint: Path) -> dict[str, TensorLayout]:
    tensors = file_tensors(checkpoint).items()
    return {name: TensorLayout(dtype=tensor.dtype, shape=list(tensor.shape)) for name, tensor in tensors}


def validate_full(path: Path, layout: PolicyLayout) -> str:
    """Returns the `Checksum` of full weights, computed in the same pass over their data.

    Raises:
        WeightsRefused: the file is not readable, its tensors are not those of `layout`, or a value is not finite.
    """
    header = readable_header(path)
    if problems := _layout_problems(header, layout):
        raise WeightsRefused(*problems)
    return _finite_checksum(path, header)


def validate_partial(path: Path, layout: PolicyLayout) -> None:
    """Checks what can be known before the other tensors are beside them.

    Raises:
        WeightsRefused: the file is not readable, holds no tensor, or has tensors that are not those of `layout`.
    """
    header = readable_header(path)
    if not header.entries:
        raise WeightsRefused.of("weights", "partial weights hold at least one tensor")
    if problems := _layout_problems(header, layout, is_partial=True):
        raise WeightsRefused(*problems)


def validate_adapter(path: Path, layout: PolicyLayout) -> tuple[str, str]:
    """Returns the `Checksum` and the configuration (JSON) of a LoRA adapter for weights of `layout`.

    Raises:
        WeightsRefused: the file is not readable, holds no configuration or no tensor, its rank is too high, a matrix
            does not fit the weight that it changes, or a value is not finite.
    """
    header = readable_header(path)
    adapter_config = header.metadata.get("adapter_config", "")
    try:
        is_object = isinstance(json.loads(adapter_config), dict)
    except ValueError:
        is_object = False
    if not is_object:
        message = "the file's metadata hold no adapter_config, the text of PEFT's adapter_config.json"
        raise WeightsRefused.of("weights", message)
    if not header.entries:
        raise WeightsRefused.of("weights", "the adapter holds no tensor")
    if (problem := rank_problem(adapter_config, layout.max_lora_rank)) is not None:
        raise WeightsRefused.of("adapter_config", problem)
    if problems := list(islice(adapter_problems(header, adapter_config, layout), MOST_SHOWN)):
        raise WeightsRefused(*problems)
    return _finite_checksum(path, header), adapter_config


def validate_delta(path: Path, layout: PolicyLayout) -> str:
    """Returns the `Checksum` of the delta's own tensors, places and new values; the weights that it changes are not
    read.

    Raises:
        WeightsRefused: the file is not readable, its changes do not fit weights of `layout`, or one is not finite.
    """
    header, checksum = readable_header(path), Checksum()
    model = header_of((name, tensor.dtype, tensor.shape) for name, tensor in layout.tensors.items()).by_name
    try:
        for name, entry in delta_entries(header, model).items():
            gaps, values = entry
            changes = read_changes(path, header, entry)
            changed_places(name, math.prod(model[name].shape), changes)
            checksum.add(gaps.name, gaps.dtype, gaps.shape, [changes.gaps.view(np.uint8).data])
            new = _finite(name, values.dtype, [changes.values.view(np.uint8).data])
            checksum.add(values.name, values.dtype, values.shape, new)
    except BadDelta as error:
        message = str(error).removeprefix(f"{error.tensor}: ").removesuffix(".")
        raise WeightsRefused.of(error.tensor, message) from error
    return checksum.hexdigest()


def _finite_checksum(path: Path, header: Header) -> str:
    """Raises `WeightsRefused` with the name of the first tensor that holds a value that is not finite."""
    checksum = Checksum()
    for entry in header.entries:
        blocks = _finite(entry.name, entry.dtype, tensor_blocks(path, header, entry))
        checksum.add(entry.name, entry.dtype, entry.shape, blocks)
    return checksum.hexdigest()


def _finite(name: str, dtype: str, blocks: Iterable[Data]) -> Iterator[Data]:
    as_integers, exponent = EXPONENTS.get(dtype, ("", 0))
    for block in blocks:
        if exponent and np.any((np.frombuffer(block, as_integers) & exponent) == exponent):
            raise WeightsRefused.of(name, "it holds NaN or infinity; the training has diverged")
        yield block


def largest_upload_bytes(layout: PolicyLayout) -> int:
    """An upper bound for full weights of the model, and for a delta that changes every value."""
    tensors = (*layout.tensors.values(), *layout.draft.values())
    values = ((math.prod(tensor.shape), DTYPE_BYTES[tensor.dtype]) for tensor in tensors)
    return MAX_HEADER_BYTES + sum(count * (value_bytes + GAP_BYTES) for count, value_bytes in values)


def too_large(most_bytes: int) -> WeightsRefused:
    message = f"they are more than {most_bytes} bytes, more than weights of this model can be"
    return WeightsRefused.of("weights", message)


def _layout_problems(header: Header, layout: PolicyLayout, is_partial: bool = False) -> list[FieldProblem]:
    """One problem for each tensor that is missing, unknown or different, up to `MOST_SHOWN` of each kind.

    Whole weights may have all tensors of the model that drafts, or none.
    """
    found, missing, different = header.by_name, list[FieldProblem](), list[FieldProblem]()
    brings_draft = not is_partial and not layout.draft.keys().isdisjoint(found)
    known = {**layout.tensors, **(layout.draft if brings_draft else {})}
    for name, expected in known.items():
        entry, model_has = found.get(name), f"the model has {expected.dtype} {expected.shape}"
        if entry is None:
            missing.append(FieldProblem(field=name, message=f"the tensor is missing; {model_has}"))
        elif (entry.dtype, list(entry.shape)) != (expected.dtype, expected.shape):
            message = f"the tensor is {entry.dtype} {list(entry.shape)}; {model_has}"
            different.append(FieldProblem(field=name, message=message))
    unknown = [
        FieldProblem(field=name, message="the tensor is not known to the model") for name in found if name not in known
    ]
    kinds = (unknown, different) if is_partial else (missing, unknown, different)
    return [problem for kind in kinds for problem in kind[:MOST_SHOWN]]


def readable_header(path: Path) -> Header:
    """Raises `WeightsRefused` if the file is not one of safetensors."""
    try:
        return read_header(path)
    except NotSafetensors as error:
        raise WeightsRefused.of("weights", str(error).replace(f"{path}", "what arrived").removesuffix(".")) from error
