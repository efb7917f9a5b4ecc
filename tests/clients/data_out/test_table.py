"""Responses as tables and files: what is a column, and that saved responses come back equal."""

import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from rollout_client import RolloutResponse, RolloutSummary, read_rollouts
from rollout_client.arrow.rows import record_batch
from rollout_client.calls.arrow_bodies import ArrowResponse
from rollout_client.contract.base import set_fields
from rollout_client.contract.messages import PackedNumbers
from rollout_client.data_out.table import FIELDS, ROWS_OF_A_BATCH
from rollout_client.json_lines import BYTE_ORDER_MARK
from tests.clients.client_calls import play_arrow
from tests.clients.data_out.responses import response_of, responses
from tests.clients.scripted_service import CLIPPED, SUMMARY, ScriptedService, result, sample

FAILED = result(1, status="error", total_reward=None, error={"kind": "timeout", "message": "Late.", "retryable": True})
RESPONSE = response_of(result(0, rewards={"format": 0.5}, level="hard"), FAILED)


def test_a_data_frame_has_a_row_a_rollout_and_columns_for_rewards_metrics_and_errors() -> None:
    frame = RESPONSE.to_pandas()
    assert frame["idx"].tolist() == [0, 1]
    assert frame["rewards.format"].iloc[0] == 0.5
    assert frame["metrics.turn_count"].tolist() == [1, 1]
    assert frame["error.kind"].iloc[1] == "timeout"
    assert frame["level"].iloc[0] == "hard"
    assert frame["message_log"][0][1]["token_ids"] == [3, 4]
    assert frame["extra_env_info"][0] == {"ground_truth": "2"}
    assert frame.groupby("status")["total_reward"].mean()["completed"] == 1.0


def test_an_arrow_table_has_the_tokens_in_its_messages() -> None:
    table = RESPONSE.to_arrow()
    [logs, _] = table["message_log"].to_pylist()
    assert logs[1]["token_ids"] == [3, 4]
    assert logs[1]["generation_logprobs"] == [-0.25, -0.75]
    assert table["total_reward"].to_pylist() == [1.0, None]


UNANSWERED = result(message_log=[{"role": "user", "content": "", "token_ids": [1]}])
ENDINGS = response_of(CLIPPED, result(), UNANSWERED)


def ending_of(frame: Any) -> tuple[Any, Any]:
    """pandas has NaN or None for a missing text, as its version has it."""
    return frame["metrics.finish_reason"], frame["metrics.finish_reason"].isna()


def test_tables_say_how_the_last_response_ended_and_which_rollouts_its_length_has_cut(tmp_path: Path) -> None:
    frame, table = ENDINGS.to_pandas(), ENDINGS.to_arrow()
    ENDINGS.to_parquet(tmp_path / "saved.parquet")
    reasons, clipped = ["length", "stop", None], [True, False, False]
    assert [None if isna else reason for reason, isna in zip(*ending_of(frame), strict=True)] == reasons
    assert frame["metrics.clipped"].tolist() == clipped
    for metrics in (table["metrics"], pq.read_table(tmp_path / "saved.parquet")["metrics"]):
        rows = metrics.to_pylist()
        assert ([row["finish_reason"] for row in rows], [row["clipped"] for row in rows]) == (reasons, clipped)
    assert ENDINGS.to_dataset()["metrics"][0]["clipped"] is True


@pytest.mark.parametrize("name", ["saved.jsonl", "saved.parquet"])
@pytest.mark.parametrize("data", [b"\x80\x3f\0\0\xff\xff\x00\xff", b"AAAAAAAA"])
def test_numbers_of_tokens_are_saved_whether_their_bytes_are_text_or_not(
    tmp_path: Path, name: str, data: bytes
) -> None:
    response = response_of(result())
    response.samples[0].message_log[1].entropy = PackedNumbers(dtype="float32", shape=[2], data=data)
    response.save(tmp_path / name)
    [saved] = read_rollouts(tmp_path / name)
    assert saved == response.samples[0]


def test_a_file_that_says_how_responses_ended_is_read_as_what_was_saved(tmp_path: Path) -> None:
    ENDINGS.save(tmp_path / "saved.parquet")
    loaded = RolloutResponse.load(tmp_path / "saved.parquet")
    assert loaded.model_dump(exclude_unset=True) == ENDINGS.model_dump(exclude_unset=True)


def test_a_file_of_an_older_client_which_does_not_say_how_responses_ended_is_read(tmp_path: Path) -> None:
    rows = [set_fields(sample) for sample in ENDINGS.samples]
    older = pa.Table.from_batches([record_batch(rows, FIELDS)], FIELDS).replace_schema_metadata(
        ENDINGS.to_arrow().schema.metadata
    )
    pq.write_table(older, tmp_path / "saved.parquet")
    assert RolloutResponse.load(tmp_path / "saved.parquet") == ENDINGS


def test_a_data_set_has_rewards_as_pairs() -> None:
    data = RESPONSE.to_dataset()
    assert data[0]["rewards"] == [{"key": "format", "value": 0.5}]
    assert data[0]["message_log"][1]["token_ids"] == [3, 4]
    assert data.num_rows == 2


def test_an_empty_response_has_tables_too() -> None:
    empty = response_of()
    assert (empty.to_arrow().num_rows, len(empty.to_pandas()), empty.to_dataset().num_rows) == (0, 0, 0)


@pytest.mark.slow
def test_without_the_packages_the_error_names_the_extra() -> None:
    program = """
        import sys
        sys.modules.update(dict.fromkeys(["pandas", "pyarrow", "datasets"]))
        from rollout_client import RolloutResponse
        response = RolloutResponse(request_id="r", metrics={}, policy={}, samples=[])
        for method in ("to_pandas", "to_arrow", "to_dataset"):
            try:
                getattr(response, method)()
            except ModuleNotFoundError as error:
                sys.stderr.write(f"{error}\\n")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines() == [
        'A data frame needs pandas: pip install "rollout-client[pandas]"',
        'Arrow needs pyarrow: pip install "rollout-client[arrow]"',
        'Arrow needs pyarrow: pip install "rollout-client[arrow]"',
    ]


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
