"""Validation of a delta without the weights that it changes: names, dtypes, places and values are checked against the
layout, which all full weights of the model have. Memory holds the changes of one tensor at a time.
"""

import math
from pathlib import Path

import numpy as np

from deployments.policy.failures import WeightsRefused
from deployments.policy.versions.weight_checks import holds_non_finite, not_finite, weights_refused
from rollout_client.policy_contract import PolicyLayout
from rollout_client.weights.checksum import Checksum
from rollout_client.weights.delta import (
    BadDelta,
    DeltaEntry,
    TensorChanges,
    changed_places,
    delta_entries,
    read_changes,
)
from rollout_client.weights.safetensors_file import NotSafetensors, TensorEntry, header_of, read_header


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
            if holds_non_finite(entry.values.dtype, changes.values.view(np.uint8).data):
                raise not_finite(name)
            add_changes(checksum, entry, changes)
    except BadDelta as error:
        raise bad_delta(error) from error
    except NotSafetensors as error:
        raise weights_refused(f"{error}".replace(str(path), "the delta").removesuffix(".")) from error
    return checksum.hexdigest()


def add_changes(checksum: Checksum, entry: DeltaEntry, changes: TensorChanges) -> None:
    parts: tuple[tuple[TensorEntry, memoryview], ...] = (
        (entry.gaps, changes.gaps.view(np.uint8).data),
        (entry.values, changes.values.view(np.uint8).data),
    )
    for part, data in parts:
        checksum.add(part.name, part.dtype, part.shape, [data])


def bad_delta(error: BadDelta) -> WeightsRefused:
    return weights_refused(str(error).removeprefix(f"{error.tensor}: ").removesuffix("."), error.tensor)
