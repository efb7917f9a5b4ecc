"""Validation of weights: everything that makes them unfit to be served is found here, before a replica gets them.

No pickle is ever read. Memory holds one block of one tensor at a time, or of a delta the changes of one tensor. A delta
is validated without the weights that it changes: names, dtypes, places and values are checked against the layout, which
all full weights of the model have.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deployments.policy.adapter_checks import adapter_problems
from deployments.policy.failures import WeightsRefused
from rollout_client.contract.policy import PolicyLayout, TensorLayout
from rollout_client.contract.problems import FieldProblem
from rollout_client.weights.checksum import Checksum
from rollout_client.weights.delta import (
    BadDelta,
    DeltaEntry,
    TensorChanges,
    changed_places,
    delta_entries,
    read_changes,
)
from rollout_client.weights.file_tensors import file_tensors, rank_problem
from rollout_client.weights.safetensors_file import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    Data,
    Header,
    NotSafetensors,
    TensorEntry,
    header_of,
    read_header,
    tensor_blocks,
)

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

NOT_OF_ALL_TEXTS = re.compile(
    r"embed|(?:^|\.)(?:wte|vision\w*|visual\w*|image\w*|audio\w*|multi_modal\w*|(?:mm_)?projector|connector|merger|mtp\w*"
    r"|nextn\w*|talker|token2wav)\."
)
"""In names of tensors: embeddings, of which each text has a few; what reads or makes images and audio; layers that
predict several tokens at once."""


def layout_of(checkpoint: Path) -> PolicyLayout:
    """The names, dtypes and shapes of a checkpoint's tensors.

    Raises:
        NotSafetensors: the folder holds no such checkpoint.
    """
    tensors = file_tensors(checkpoint)
    return PolicyLayout(
        tensors={name: TensorLayout(dtype=tensor.dtype, shape=list(tensor.shape)) for name, tensor in tensors.items()}
    )


def validate_full(path: Path, layout: PolicyLayout) -> Checksum:
    """Returns the checksum of full weights, computed in the same pass over their data.

    Raises:
        WeightsRefused: the file is not readable, its tensors are not those of `layout`, or a value is not finite.
    """
    header = _readable_header(path)
    if problems := list(_layout_problems(header, layout)):
        raise WeightsRefused(*problems)
    return _finite_checksum(path, header)


def validate_partial(path: Path, layout: PolicyLayout) -> list[str]:
    """Checks what can be known before the other tensors are beside them; returns their names.

    Raises:
        WeightsRefused: the file is not readable, holds no tensor, or has tensors that are not those of `layout`.
    """
    header = _readable_header(path)
    if not header.entries:
        raise WeightsRefused.of("weights", "partial weights hold at least one tensor")
    if problems := list(_layout_problems(header, layout, is_partial=True)):
        raise WeightsRefused(*problems)
    return [entry.name for entry in header.entries]


def validate_adapter(path: Path, layout: PolicyLayout) -> tuple[str, str]:
    """Returns the `Checksum` and the configuration (JSON) of a LoRA adapter for weights of `layout`.

    Raises:
        WeightsRefused: the file is not readable, holds no configuration or no tensor, its rank is too high, a matrix
            does not fit the weight that it changes, or a value is not finite.
    """
    header = _readable_header(path)
    adapter_config = header.metadata.get("adapter_config", "")
    try:
        is_object = isinstance(json.loads(adapter_config), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise WeightsRefused.of(
            "weights", "the file's metadata hold no adapter_config, the text of PEFT's adapter_config.json"
        )
    if not header.entries:
        raise WeightsRefused.of("weights", "the adapter holds no tensor")
    if (problem := rank_problem(adapter_config, layout.max_lora_rank)) is not None:
        raise WeightsRefused.of("adapter_config", problem)
    if problems := list(islice(adapter_problems(header, adapter_config, layout), MOST_SHOWN)):
        raise WeightsRefused(*problems)
    return _finite_checksum(path, header).hexdigest(), adapter_config


def _finite_checksum(path: Path, header: Header) -> Checksum:
    """Raises `WeightsRefused` with the name of the first tensor that holds a value that is not finite."""
    checksum = Checksum()
    for entry in header.entries:
        checksum.add(entry.name, entry.dtype, entry.shape, _finite_blocks(path, header, entry))
    return checksum


def _finite_blocks(path: Path, header: Header, entry: TensorEntry) -> Iterator[bytes]:
    for block in tensor_blocks(path, header, entry):
        if _holds_non_finite(entry.dtype, block):
            raise _not_finite(entry.name)
        yield block


def _holds_non_finite(dtype: str, block: Data) -> bool:
    if dtype not in EXPONENTS:
        return False
    as_integers, exponent = EXPONENTS[dtype]
    return bool(np.any((np.frombuffer(block, as_integers) & exponent) == exponent))


class _ChangedValues(NamedTuple):
    """How many values of full weights differ from others, and how many there are."""

    changed: int
    total: int
    share_of_all_texts: float
    """The share that has changed of the values with which the log-probabilities of every text are computed."""


def changed_values(old: Path, new: Path) -> _ChangedValues:
    """Compares `new` with `old`, which has the same tensors."""
    old_header, new_header = read_header(old), read_header(new)
    changed, count = Counter[bool](), Counter[bool]()
    for entry in new_header.entries:
        value_bytes = DTYPE_BYTES[entry.dtype]
        of_all_texts = NOT_OF_ALL_TEXTS.search(entry.name) is None
        blocks = (tensor_blocks(old, old_header, old_header.by_name[entry.name]), tensor_blocks(new, new_header, entry))
        for before, after in zip(*blocks, strict=True):
            differs = np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8)
            changed[of_all_texts] += int(np.count_nonzero(differs.reshape(-1, value_bytes).any(axis=1)))
        count[of_all_texts] += entry.size_bytes // value_bytes
    share = changed[True] / count[True] if count[True] else 0.0
    return _ChangedValues(changed.total(), count.total(), share)


def largest_upload_bytes(layout: PolicyLayout) -> int:
    """An upper bound for full weights of the model, and for a delta that changes every value."""
    values = ((math.prod(tensor.shape), DTYPE_BYTES[tensor.dtype]) for tensor in layout.tensors.values())
    return MAX_HEADER_BYTES + sum(count * (value_bytes + GAP_BYTES) for count, value_bytes in values)


def too_large(most_bytes: int) -> WeightsRefused:
    return WeightsRefused.of(
        "weights", f"they are more than {most_bytes} bytes, more than weights of this model can be"
    )


def _layout_problems(header: Header, layout: PolicyLayout, is_partial: bool = False) -> Iterator[FieldProblem]:
    """One problem for each tensor that is missing, unknown or different, up to `MOST_SHOWN` of each kind."""
    found = header.by_name
    missing = [] if is_partial else [name for name in layout.tensors if name not in found]
    for name in missing[:MOST_SHOWN]:
        expected = layout.tensors[name]
        model_has = f"the model has {expected.dtype} {expected.shape}"
        yield FieldProblem(field=name, message=f"the tensor is missing{_like_others(missing)}; {model_has}")
    unknown = [name for name in found if name not in layout.tensors]
    for name in unknown[:MOST_SHOWN]:
        yield FieldProblem(field=name, message=f"the tensor is not known to the model{_like_others(unknown)}")
    different = [
        problem
        for name, expected in layout.tensors.items()
        if name in found and (problem := difference(found[name], expected)) is not None
    ]
    yield from different[:MOST_SHOWN]
    if len(different) > MOST_SHOWN:
        yield FieldProblem(field="weights", message=f"{len(different) - MOST_SHOWN} more tensors are different")


def _like_others(names: list[str]) -> str:
    return f", like {len(names) - 1} more" if len(names) > 1 else ""


def difference(found: TensorEntry, expected: TensorLayout) -> FieldProblem | None:
    properties = (("shape", list(found.shape), expected.shape), ("dtype", found.dtype, expected.dtype))
    differences = [
        f"its {name} is {actual}; the model's is {wanted}" for name, actual, wanted in properties if actual != wanted
    ]
    return FieldProblem(field=found.name, message="; ".join(differences)) if differences else None


def _readable_header(path: Path) -> Header:
    try:
        return read_header(path)
    except NotSafetensors as error:
        raise WeightsRefused.of("weights", str(error).replace(f"{path}", "what arrived").removesuffix(".")) from error


def _not_finite(name: str) -> WeightsRefused:
    return WeightsRefused.of(name, "it holds NaN or infinity; the training has diverged")


def validate_delta(path: Path, layout: PolicyLayout) -> str:
    """Returns the `Checksum` of the delta's own tensors, places and new values.

    Raises:
        WeightsRefused: the file is not readable, its changes do not fit weights of `layout`, or one is not finite.
    """
    model = header_of((name, tensor.dtype, tensor.shape) for name, tensor in layout.tensors.items()).by_name
    checksum = Checksum()
    try:
        header = read_header(path)
        for name, entry in delta_entries(header, model).items():
            changes = read_changes(path, header, entry)
            changed_places(name, math.prod(model[name].shape), changes)
            if _holds_non_finite(entry.values.dtype, changes.values.view(np.uint8).data):
                raise _not_finite(name)
            _add_changes(checksum, entry, changes)
    except BadDelta as error:
        raise _bad_delta(error) from error
    except NotSafetensors as error:
        raise WeightsRefused.of("weights", f"{error}".replace(str(path), "the delta").removesuffix(".")) from error
    return checksum.hexdigest()


def _add_changes(checksum: Checksum, entry: DeltaEntry, changes: TensorChanges) -> None:
    parts: tuple[tuple[TensorEntry, memoryview], ...] = (
        (entry.gaps, changes.gaps.view(np.uint8).data),
        (entry.values, changes.values.view(np.uint8).data),
    )
    for part, data in parts:
        checksum.add(part.name, part.dtype, part.shape, [data])


def _bad_delta(error: BadDelta) -> WeightsRefused:
    return WeightsRefused.of(error.tensor, str(error).removeprefix(f"{error.tensor}: ").removesuffix("."))
