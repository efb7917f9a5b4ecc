"""The columns of `include`, as tensors: each row where its token is."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.protocols.token_columns import packed_rows
from rollout_client.contract.messages import Message
from rollout_client.contract.rollouts import SampleResult
from rollout_client.tensors import logprobs_within, to_tensors
from tests.clients.scripted_service import result


def result_of(log: list[Message]) -> SampleResult:
    return SampleResult.model_validate(result() | {"message_log": log})


PROMPT = Message(
    role="user", content="", token_ids=[1, 2], routed_experts=packed_rows([10, 11, 20, 21], "uint16", [1, 2])
)
RESPONSE = Message(
    role="assistant",
    content="",
    token_ids=[3, 4],
    generation_logprobs=[-1.0, -2.0],
    routed_experts=packed_rows([30, 31], "uint16", [1, 2]),
    top_token_ids=packed_rows([3, 5, 4, 6], "int32", [2]),
    top_logprobs=packed_rows([-1.0, -3.0, -2.0, -4.0], "float32", [2]),
    sampling_mask=packed_rows([3, 4, 5, 6], "int32"),
    sampling_mask_sizes=packed_rows([1, 3], "uint16"),
    entropy=packed_rows([0.5, 0.25], "float32"),
)


def test_each_row_stands_where_its_token_is() -> None:
    short = [Message(role="user", content="", token_ids=[7])]
    batch = to_tensors([result_of([PROMPT, RESPONSE]), result_of(short)], pad_token_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [7, 0, 0, 0]]
    included = {name: column.tolist() for name, column in batch.included.items()}
    none, no_row = [0, 0], [[0, 0]]
    assert included == {
        "routed_experts": [[[[10, 11]], [[20, 21]], [[30, 31]], no_row], [no_row] * 4],
        "top_token_ids": [[none, none, [3, 5], [4, 6]], [none] * 4],
        "top_logprobs": [[none, none, [-1.0, -3.0], [-2.0, -4.0]], [none] * 4],
        "sampling_mask": [[[-1] * 3, [-1] * 3, [3, -1, -1], [4, 5, 6]], [[-1] * 3] * 4],
        "entropy": [[0.0, 0.0, 0.5, 0.25], [0.0] * 4],
    }
    types = {name: column.dtype for name, column in batch.included.items()}
    assert types["routed_experts"] == types["sampling_mask"] == types["top_token_ids"] == torch.int32


@given(
    st.lists(st.sets(st.integers(0, 4), min_size=1).map(sorted) | st.just([]), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_the_log_softmax_over_the_mask_is_of_logits_without_the_others(masks: list[list[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(masks), 5, generator=generator, dtype=torch.float64, requires_grad=True)
    widest = max(map(len, masks))
    padded = torch.tensor([mask + [-1] * (widest - len(mask)) for mask in masks], dtype=torch.int32)
    chosen = torch.tensor([mask[-1] if mask else 2 for mask in masks])
    left_out = torch.tensor([[bool(mask) and place not in mask for place in range(5)] for mask in masks])
    expected = logits.masked_fill(left_out, -torch.inf).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    found = logprobs_within(logits, chosen, padded)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs)
