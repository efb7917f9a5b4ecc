"""Whether the tensors of a source are those of the service's model, and what is named where they are not."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.weights.layout import WeightsDoNotFit, fitted, names_in_model
from rollout_client.weights.safetensors_file import Data, SourceTensor
from tests.clients.scripted_policy import layout_of

LAYOUT = layout_of({"embed": ("BF16", [4, 3]), "mask": ("BOOL", [2])})


@dataclass
class NamedTensor(SourceTensor):
    """Tied to tensors of the same `content`; counts how often that is asked."""

    dtype: str = "BF16"
    shape: tuple[int, ...] = (4, 3)
    content: str = ""
    comparisons: int = 0

    def blocks(self, dtype: str) -> Iterator[Data]:
        raise AssertionError("A check of names, shapes and dtypes reads no data.")

    def is_tied_to(self, other: SourceTensor) -> bool:
        self.comparisons += 1
        return isinstance(other, NamedTensor) and other.content == self.content


MASK = NamedTensor("BOOL", (2,))


def misfit(**tensors: NamedTensor) -> tuple[list[str], list[str], dict[str, str]]:
    with pytest.raises(WeightsDoNotFit) as refused:
        fitted(tensors, LAYOUT)
    return refused.value.missing, refused.value.extra, refused.value.wrong


def test_the_tensors_of_the_model_fit_in_the_order_of_the_source() -> None:
    embed = NamedTensor("F32")
    assert list(fitted({"mask": MASK, "embed": embed}, LAYOUT).items()) == [("mask", MASK), ("embed", embed)]


@pytest.mark.parametrize(
    ("name", "wrong", "difference"),
    [
        ("embed", NamedTensor("F8_E4M3"), "is F8_E4M3 instead of BF16"),
        ("embed", NamedTensor("I16"), "is I16 instead of BF16"),
        ("mask", NamedTensor("F32", (2,)), "is F32 instead of BOOL"),
        ("embed", NamedTensor(shape=(3, 4)), "has shape [3, 4] instead of [4, 3]"),
    ],
)
def test_no_other_dtype_and_no_other_shape_fits(name: str, wrong: NamedTensor, difference: str) -> None:
    assert misfit(**{"mask": MASK, "embed": NamedTensor(), name: wrong}) == ([], [], {name: difference})


def test_an_extra_tensor_is_left_out_if_it_is_tied_to_one_that_is_sent() -> None:
    embed = NamedTensor(content="shared")
    assert fitted({"embed": embed, "mask": MASK, "head": NamedTensor(content="shared")}, LAYOUT).keys() == {
        "embed",
        "mask",
    }
    assert misfit(embed=embed, mask=MASK, head=NamedTensor(content="own")) == ([], ["head"], {})


def test_partial_weights_fit_without_the_others() -> None:
    assert fitted({"mask": MASK}, LAYOUT, is_partial=True) == {"mask": MASK}
    with pytest.raises(WeightsDoNotFit, match="Not known there: head"):
        fitted({"mask": MASK, "head": NamedTensor()}, LAYOUT, is_partial=True)


def test_tensors_are_compared_only_where_all_else_fits() -> None:
    head, long = NamedTensor(), NamedTensor(shape=(12,))
    assert misfit(embed=NamedTensor(), mask=MASK, head=long) == ([], ["head"], {})
    assert misfit(mask=MASK, head=head) == (["embed"], ["head"], {})
    assert misfit(mask=MASK, embed=NamedTensor("I8"), head=head)[1] == ["head"]
    assert (head.comparisons, long.comparisons) == (0, 0)


@pytest.mark.parametrize(
    ("missing", "shown"), [(["a"], "a"), ([f"a.{place}" for place in range(7)], "a.0, a.1, a.2, a.3, a.4 and 2 more")]
)
def test_every_finding_is_named_with_at_most_five_names(missing: list[str], shown: str) -> None:
    assert str(WeightsDoNotFit(missing, ["b", "c"], {"d": "is F32 instead of BOOL"})) == (
        f"The weights are not those of the model that the service serves; nothing was sent. Missing: {shown}. "
        "Not known there: b, c. Different: d is F32 instead of BOOL."
    )


WRAPPED_ANYWHERE = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
NAME = "model.layers.0.self_attn.q_proj.weight"


@given(
    front=st.lists(st.sampled_from(("module.", "base_model.model.", *WRAPPED_ANYWHERE)), max_size=4),
    inside=st.lists(st.lists(st.sampled_from(WRAPPED_ANYWHERE), max_size=2), min_size=5, max_size=5),
    prefix=st.sampled_from(("model.", "model.language_model.", "language_model.model.")),
)
def test_a_tensor_is_found_however_it_is_wrapped(front: list[str], inside: list[list[str]], prefix: str) -> None:
    parts = NAME.removeprefix("model.").split(".")
    wrapped = "".join(
        [*front, prefix, ".".join("".join(each) + part for each, part in zip([[], *inside], parts, strict=False))]
    )
    assert names_in_model([wrapped], {NAME}) == {wrapped: NAME}


@pytest.mark.parametrize(
    "name",
    [
        "encoder.layers.0.self_attn.q_proj.weight",
        "model.layers.99.self_attn.q_proj.weight",
        "lm.layers.0.self_attn.q_proj.weight",
        "model.module.layers.0.self_attn.q_proj.weight",
    ],
)
def test_a_name_that_is_not_wrapped_by_a_usual_wrapper_stays_unknown(name: str) -> None:
    assert names_in_model([name], {NAME}) == {name: name}


def test_no_two_tensors_become_one() -> None:
    assert names_in_model([f"module.{NAME}", NAME], {NAME}) == {NAME: NAME, f"module.{NAME}": f"module.{NAME}"}
    names = [f"module.{NAME}", f"_orig_mod.{NAME}"]
    assert names_in_model(names, {NAME}) == {names[0]: NAME, names[1]: names[1]}
