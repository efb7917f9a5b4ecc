"""Hypothesis strategies of the contract's types, derived from the pydantic models."""

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel, JsonValue

Json = dict[str, Any]
Strategies = Mapping[str, st.SearchStrategy[Any]]
texts = st.text(max_size=8)
floats = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(texts, values, max_size=3),
    max_leaves=5,
)
LEAVES = {str: texts, float: floats, int: counts, bool: st.booleans(), NoneType: st.none(), JsonValue: json_values}


def drawn(kind: Any, given: Strategies) -> st.SearchStrategy[Any]:
    """Values of a type as JSON.

    Args:
        given: of fields by their names, in all models, in place of what their types say.
    """
    kinds = get_args(kind)
    match get_origin(kind):
        case origin if origin is Annotated:
            return drawn(kinds[0], given)
        case origin if origin in (Union, UnionType):
            return st.one_of(*(drawn(each, given) for each in kinds))
        case origin if origin is Literal:
            return st.sampled_from(kinds)
        case origin if origin is list:
            return st.lists(drawn(kinds[0], given), max_size=3)
        case origin if origin is dict:
            return st.dictionaries(texts, drawn(kinds[1], given), max_size=2)
    return LEAVES[kind] if kind in LEAVES else drawn_model(kind, given)


def drawn_model(model: type[BaseModel], given: Strategies) -> st.SearchStrategy[Json]:
    """Objects with some of the optional fields, and one or the other that the model does not know."""
    fields = {
        name: given[name] if name in given else drawn(field.rebuild_annotation(), given)
        for name, field in model.model_fields.items()
    }
    required = {name: field for name, field in fields.items() if model.model_fields[name].is_required()}
    optional = {name: field for name, field in fields.items() if name not in required}
    further = st.dictionaries(texts.filter(lambda name: name not in fields), json_values, max_size=2)
    return st.builds(lambda said, more: more | said, st.fixed_dictionaries(required, optional=optional), further)
