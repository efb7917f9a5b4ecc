"""One rollout as a row of tokens."""

import subprocess
import sys

import pytest

from rollout_client.results import TokenRow, token_row
from tests.clients.message_logs import NOT_FREE, TWO_TURNS, generated, given_message, rollout


def test_a_row_is_the_concatenated_log_with_the_generated_tokens_marked() -> None:
    assert token_row(TWO_TURNS) == TokenRow(
        token_ids=[1, 2, 3, 4, 5, 6, 7, 8],
        loss_mask=[0, 0, 1, 1, 0, 1, 0, 0],
        generation_logprobs=[0, 0, -0.25, -0.25, 0, -1.5, 0, 0],
        weight_versions=[-1, -1, 7, 8, -1, 8, -1, -1],
        prompt_length=2,
        generated_length=6,
    )


def test_without_its_tail_a_row_ends_at_its_last_generated_token() -> None:
    assert token_row(TWO_TURNS).without_tail() == TokenRow(
        token_ids=[1, 2, 3, 4, 5, 6],
        loss_mask=[0, 0, 1, 1, 0, 1],
        generation_logprobs=[0, 0, -0.25, -0.25, 0, -1.5],
        weight_versions=[-1, -1, 7, 8, -1, 8],
        prompt_length=2,
        generated_length=6,
    )


def test_a_row_without_a_generated_token_is_all_prompt_and_keeps_all_its_tokens_without_its_tail() -> None:
    row = token_row(rollout(given_message(1, 2), generated(), given_message(3)))
    assert row == TokenRow([1, 2, 3], [0, 0, 0], [0, 0, 0], [-1, -1, -1], prompt_length=3, generated_length=3)
    assert row.without_tail() == row


def test_what_the_policy_did_not_sample_freely_is_context_that_stays_in_the_row() -> None:
    row = token_row(NOT_FREE).without_tail()
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert row.loss_mask == [0, 0, 0, 1, 0, 1, 0]
    assert (row.prompt_length, row.generated_length) == (1, 7)
    assert row.part(2, 9).generated_length == 5


def test_the_versions_of_a_message_that_was_not_generated_are_unknown() -> None:
    spans = [{"version": "4", "start": 0, "end": 2}]
    assert token_row(rollout(given_message(1, 2) | {"weight_versions": spans})).weight_versions == [-1, -1]


def test_a_span_that_reaches_beyond_its_message_ends_with_it() -> None:
    spans = [{"version": "4", "start": 1, "end": 9}]
    row = token_row(rollout(generated(1, 2, weight_versions=spans), given_message(3)))
    assert row.weight_versions == [-1, 4, -1]


def test_a_generated_message_needs_one_logprob_per_token() -> None:
    with pytest.raises(ValueError, match=r"^A message has 2 token_ids and 1 generation_logprobs; there must be one"):
        token_row(rollout(generated(1, 2, generation_logprobs=[-0.5])))


@pytest.mark.slow
def test_importing_the_client_and_the_results_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, rollout_client\n"
        "from rollout_client.results import final_reward, group_relative_advantages, token_row\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
