"""Whether the matrices of a LoRA adapter fit the weights that they change. No I/O.

vLLM itself takes matrices that are smaller than a layer, and generates with whatever lies beside them in its memory.
"""

import json
from collections.abc import Iterator, Sequence

from rollout_client.policy_contract import PolicyLayout
from rollout_client.problem_contract import FieldProblem
from rollout_client.weights.safetensors_file import Header

PREFIX = "base_model.model."
"""With which PEFT begins the names of an adapter's tensors."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


def adapter_problems(header: Header, adapter_config: str, layout: PolicyLayout) -> Iterator[FieldProblem]:
    """One problem for each matrix whose shape does not fit.

    A layer with a weight of [rows, columns] takes an A of [rank, columns] and a B of [rows, rank]. What `layout` does
    not name is left to the engine, and so are adapters of models that keep their weights transposed.
    """
    if json.loads(adapter_config).get("fan_in_fan_out"):
        return
    shapes = {entry.name: tuple(entry.shape) for entry in header.entries}
    for name, shape in shapes.items():
        layer = name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)
        weight = layout.tensors.get(f"{layer}.weight")
        if weight is None or not name.endswith((DOWN, UP)) or len(weight.shape) != len(("rows", "columns")):
            continue
        rows, columns = weight.shape
        down = shapes.get(f"{name.removesuffix(UP)}{DOWN}", ())
        rank = down[0] if name.endswith(UP) and down else None
        takes = (rank, columns) if name.endswith(DOWN) else (rows, rank)
        if not fits(shape, takes):
            said = ", ".join("rank" if size is None else str(size) for size in takes)
            yield FieldProblem(field=name, message=f"its shape is {list(shape)}; {layer} takes [{said}]")


def fits(shape: Sequence[int], takes: Sequence[int | None]) -> bool:
    """Args: `takes` has `None` for a size that is free."""
    return len(shape) == len(takes) and all(size in (None, actual) for actual, size in zip(shape, takes, strict=True))
