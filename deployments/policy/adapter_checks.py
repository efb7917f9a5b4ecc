"""Whether the matrices of a LoRA adapter are those of modules of the model, and fit them. No I/O.

vLLM itself generates without a word with matrices that belong to no module of the model, and with matrices that are
smaller than a layer, for which it takes whatever lies beside them in its memory.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

import regex  # type: ignore[import-untyped]

from deployments.policy.failures import WeightsRefused
from rollout_client.contract.base import FieldProblem
from rollout_client.contract.policy import PolicyLayout
from rollout_client.weights.layout import TEXT_MODELS, WRAPPERS, names_in_model
from rollout_client.weights.safetensors_file import Header

PREFIX = "base_model.model."
"""With which PEFT begins the names of an adapter's tensors."""
MATRIX = re.compile(r"(?P<module>.+)\.(?P<half>lora_[AB]\.weight|lora_embedding_[AB])")
NOT_A_MATRIX = "it is not a matrix of a LoRA adapter, as <module>.lora_A.weight is"
MATCH_TIMEOUT_S = 1.0
OTHER_HALF = str.maketrans("AB", "BA")
NESTED_IN = (*TEXT_MODELS, "language_model.")
BASE_WEIGHTS = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
"""PEFT saves the embeddings beside their adapter, as they are in the base. Engines pass over them."""


def _modules_in_model(header: Header, layout: PolicyLayout) -> dict[str, str]:
    """By the name of each matrix, the module that it changes: under its name in `layout`, if that has the module.

    A module that `layout` does not have is named without what wrappers add.
    """
    found = {entry.name: match["module"] for entry in header.entries if (match := MATRIX.fullmatch(entry.name))}
    modules = {name.rpartition(".")[0] for name in layout.tensors}
    names = names_in_model(dict.fromkeys(found.values()), modules)
    return {
        name: names[module] if names[module] in modules else WRAPPERS.sub("", module) for name, module in found.items()
    }


def names_for_engines(header: Header, layout: PolicyLayout) -> dict[str, str]:
    """By the name of each tensor, the name by which engines find its module."""
    names = {entry.name: entry.name for entry in header.entries}
    for name, module in _modules_in_model(header, layout).items():
        if _module_of(name) != module:
            names[name] = f"{PREFIX}{module}.lora_{name.rpartition('.lora_')[2]}"
    return names


def config_for_engines(adapter_config: str, names: Mapping[str, str]) -> str:
    """The text of an `adapter_config.json` whose ranks and alphas of single modules are those of the same modules under
    their new names.

    PEFT's keys are regular expressions, which are looked for at the end of a module's name. So each is put in place by
    the names of the modules that it matches.

    Args:
        names: by the name of each tensor, its new one.

    Raises:
        WeightsRefused: a key takes too long.
    """
    modules = {_parameter_of(_module_of(name)): _parameter_of(_module_of(new)) for name, new in names.items()}
    try:
        config = json.loads(adapter_config)
        patterns = {key: config[key] for key in ("rank_pattern", "alpha_pattern") if config.get(key)}
        renamed = {
            key: {
                f"^{re.escape(new)}": pattern[found]
                for module, new in modules.items()
                if (found := _matching(pattern, module)) is not None
            }
            for key, pattern in patterns.items()
        }
    except (ValueError, AttributeError, regex.error):
        # The validation says what is wrong with it, or the engine does.
        return adapter_config
    return json.dumps(config | renamed) if renamed else adapter_config


def _matching(pattern: Mapping[str, object], module: str) -> str | None:
    """The first key that matches the module, as PEFT and engines choose it.

    Raises:
        WeightsRefused: a key takes too long, as `(a+)+` may.
    """
    for key in pattern:
        try:
            if regex.match(rf"(.*\.)?({key})$", module, timeout=MATCH_TIMEOUT_S):
                return key
        except TimeoutError:
            message = f"the key {key} takes longer than {MATCH_TIMEOUT_S:g} s to be compared with {module}"
            raise WeightsRefused.of("adapter_config", message) from None
    return None


def _parameter_of(module: str) -> str:
    """The name by which keys find a module: fused experts are known by their parameters."""
    if module.endswith(".experts.base_layer"):
        return f"{module.removesuffix('.base_layer')}.gate_up_proj"
    return f"{module}.down_proj" if module.endswith(".experts") else module


def adapter_problems(header: Header, adapter_config: str, layout: PolicyLayout) -> Iterator[FieldProblem]:
    """One problem for each tensor that is not a matrix of a module of the model, or does not fit its module.

    A layer with a weight of [rows, columns] takes an A of [rank, columns] and a B of [rows, rank]; embeddings take them
    the other way round. Left to the engine is what `layout` cannot tell: the shapes where weights are transposed or
    packed, and modules of a kind that the checkpoint has nowhere, such as a tied output layer or fused experts.
    """
    is_transposed = bool(json.loads(adapter_config).get("fan_in_fan_out"))
    shapes = {entry.name: tuple(entry.shape) for entry in header.entries}
    places = _modules_in_model(header, layout)
    known = {name.rpartition(".")[0]: None for name in layout.tensors}
    by_kind = {module.rpartition(".")[2]: module for module in reversed(known)}
    ends = {_without_text_prefix(module) for module in known}
    for name, shape in shapes.items():
        if name not in places:
            if not name.endswith(BASE_WEIGHTS):
                yield FieldProblem(field=name, message=NOT_A_MATRIX)
            continue
        module, half = places[name], str(MATRIX.fullmatch(name)["half"])  # type: ignore[index]  # it is in places
        other = shapes.get(f"{name.removesuffix(half)}{half.translate(OTHER_HALF)}")
        if other is None:
            yield FieldProblem(field=name, message=f"there is no {half.translate(OTHER_HALF)} beside it")
        kind = module.rpartition(".")[2]
        if module not in known and kind in by_kind and _without_text_prefix(module) not in ends:
            message = f"the model has no module {module}; it has, for example, {by_kind[kind]}"
            yield FieldProblem(field=name, message=message)
        weight = layout.tensors.get(f"{module}.weight")
        if weight is None or is_transposed or len(weight.shape) != len(("rows", "columns")) or "F" not in weight.dtype:
            continue
        rows, columns = weight.shape if half.endswith(".weight") else reversed(weight.shape)
        rank = other[0] if other and half.startswith(("lora_B", "lora_embedding_B")) else None
        takes = (rank, columns) if half.startswith(("lora_A", "lora_embedding_A")) else (rows, rank)
        if not _has_shape(shape, takes):
            said = ", ".join("rank" if size is None else str(size) for size in takes)
            yield FieldProblem(field=name, message=f"its shape is {list(shape)}; {module} takes [{said}]")


def _module_of(name: str) -> str:
    return name.removeprefix(PREFIX).rpartition(".lora_")[0]


def _without_text_prefix(module: str) -> str:
    """The name without what differs where models are nested differently: engines know more such names than `layout`."""
    while prefix := next((each for each in NESTED_IN if module.startswith(each)), None):
        module = module.removeprefix(prefix)
    return module


def _has_shape(shape: Sequence[int], takes: Sequence[int | None]) -> bool:
    """Whether the shape is `takes`, in which `None` stands for any size."""
    return len(shape) == len(takes) and all(size in (None, actual) for actual, size in zip(shape, takes, strict=True))
