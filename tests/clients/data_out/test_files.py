"""Saved responses come back equal: tokens, log-probabilities, spans, further fields and explicit nulls."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from rollout_client import RolloutResponse, RolloutSummary, read_rollouts
from rollout_client.calls.arrow_bodies import ArrowResponse
from rollout_client.data_out.table import ROWS_OF_A_BATCH
from rollout_client.json_lines import BYTE_ORDER_MARK
from tests.clients.client_calls import play_arrow
from tests.clients.data_out.responses import response_of, responses
from tests.clients.scripted_service import SUMMARY, ScriptedService, result, sample


def said(response: RolloutResponse | ArrowResponse) -> dict[str, Any]:
    return response.model_dump(exclude_unset=True)


@pytest.mark.parametrize("name", ["saved.jsonl", "saved.parquet"])
@given(response=responses)
def test_a_saved_response_comes_back_with_every_field_that_was_set(name: str, response: RolloutResponse) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        response.save(path)
        assert said(RolloutResponse.load(path)) == said(response)
        assert list(read_rollouts(path)) == response.samples


@pytest.mark.parametrize("name", ["saved.jsonl", "saved.parquet"])
def test_infinite_log_probabilities_and_64_bits_of_a_number_survive(tmp_path: Path, name: str) -> None:
    logprobs = [float("-inf"), -0.1]
    message = {"role": "assistant", "content": "", "token_ids": [1, 2**31 - 1], "generation_logprobs": logprobs}
    response_of(result(message_log=[message])).save(tmp_path / name)
    [loaded] = RolloutResponse.load(tmp_path / name).samples
    assert loaded.message_log[0].generation_logprobs == logprobs
    assert loaded.message_log[0].token_ids == [1, 2**31 - 1]


def test_a_response_in_arrow_is_saved_as_what_the_json_one_says(service: ScriptedService, tmp_path: Path) -> None:
    response = play_arrow(service.url, sample(), num_generations=2)
    for name in ("saved.jsonl", "saved.parquet"):
        response.save(tmp_path / name)
        assert said(RolloutResponse.load(tmp_path / name)) == said(response.to_response())


def test_a_parquet_file_of_many_rollouts_keeps_their_order(tmp_path: Path) -> None:
    response = response_of(*[result(idx) for idx in range(ROWS_OF_A_BATCH + 1)])
    response.to_parquet(tmp_path / "saved.parquet")
    assert RolloutResponse.load(tmp_path / "saved.parquet") == response


def test_a_file_of_rollouts_without_a_summary_is_read_and_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    response = response_of(result(5))
    response.save(path)
    path.write_bytes(path.read_bytes().splitlines()[0] + b"\n\n")
    assert [rollout.idx for rollout in read_rollouts(path)] == [5]
    with pytest.raises(ValueError, match=r"run.jsonl has no summary: a file that `save` wrote whole has one\."):
        RolloutResponse.load(path)


def test_a_file_is_read_with_a_byte_order_mark_and_with_any_character_in_its_texts(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    response = response_of(result(5, answer="a\u2028b\x85c"))
    response.save(path)
    path.write_bytes(BYTE_ORDER_MARK + path.read_bytes())
    assert RolloutResponse.load(path) == response
    path.write_bytes(BYTE_ORDER_MARK + b"\n{}")
    with pytest.raises(ValueError, match=r"run.jsonl line 2 is not a rollout"):
        list(read_rollouts(path))


def test_another_end_of_the_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"saved.csv must end in .jsonl or .parquet"):
        response_of().save(tmp_path / "saved.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_is_no_rollout_is_named(tmp_path: Path) -> None:
    path = tmp_path / "saved.jsonl"
    response_of(result()).save(path)
    path.write_bytes(path.read_bytes().splitlines()[0] + b'\n{"idx": 1}\n')
    with pytest.raises(ValueError, match=r"saved.jsonl line 2 is not a rollout: generation_index: Field required\."):
        list(read_rollouts(path))


def test_a_parquet_file_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ValueError, match=r"is not a file of rollouts: it has no column message_log, status"):
        list(read_rollouts(path))
    path.write_text("text")
    with pytest.raises(ValueError, match=r"other.parquet is not a Parquet file: "):
        list(read_rollouts(path))


def test_the_summary_comes_back_as_it_was(tmp_path: Path) -> None:
    response_of().save(tmp_path / "a.parquet")
    loaded = RolloutResponse.load(tmp_path / "a.parquet")
    assert RolloutSummary(**SUMMARY).model_dump() == loaded.model_dump(exclude={"samples"})
