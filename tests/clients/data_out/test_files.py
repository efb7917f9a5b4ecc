"""Files of rollouts: saved responses come back equal, answers are read as they came, and tables say how they ended."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from rollout_client import RolloutResponse, SampleResult, read_rollouts
from rollout_client.calls.arrow_bodies import ArrowResponse
from rollout_client.contract.messages import PackedNumbers
from rollout_client.data_out.table import ROWS_OF_A_BATCH
from rollout_client.errors import RequestRejected
from rollout_client.json_lines import BYTE_ORDER_MARK
from tests.clients.client_calls import play_arrow
from tests.clients.data_out.responses import response_of, responses
from tests.clients.scripted_service import CLIPPED, REJECTED, SUMMARY, ScriptedService, result, sample

both_forms = pytest.mark.parametrize("name", ["saved.jsonl", "saved.parquet"])


def said(response: RolloutResponse | ArrowResponse) -> dict[str, Any]:
    return response.model_dump(exclude_unset=True)


@both_forms
@given(response=responses)
def test_a_saved_response_comes_back_with_every_field_that_was_set(name: str, response: RolloutResponse) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        response.save(path)
        assert said(RolloutResponse.load(path)) == said(response)
        assert list(read_rollouts(path)) == response.samples


@both_forms
@pytest.mark.parametrize("data", [b"\x80\x3f\0\0\xff\xff\x00\xff", b"AAAAAAAA"])
def test_packed_numbers_are_saved_whether_their_bytes_are_text_or_not(tmp_path: Path, name: str, data: bytes) -> None:
    response = response_of(result())
    response.samples[0].message_log[1].entropy = PackedNumbers(dtype="float32", shape=[2], data=data)
    response.save(tmp_path / name)
    [saved] = read_rollouts(tmp_path / name)
    assert saved == response.samples[0]


@both_forms
def test_a_response_in_arrow_is_saved_as_the_json_one(service: ScriptedService, tmp_path: Path, name: str) -> None:
    response = play_arrow(service.url, sample(), num_generations=2)
    response.save(tmp_path / name)
    assert said(RolloutResponse.load(tmp_path / name)) == said(response.to_response())


def test_a_parquet_file_of_many_rollouts_keeps_their_order(tmp_path: Path) -> None:
    response = response_of(*[result(idx) for idx in range(ROWS_OF_A_BATCH + 1)])
    response.save(tmp_path / "saved.parquet")
    assert RolloutResponse.load(tmp_path / "saved.parquet") == response


def test_a_table_has_tokens_and_says_which_rollouts_were_cut(tmp_path: Path) -> None:
    unanswered = result(message_log=[{"role": "user", "content": "", "token_ids": [1]}], total_reward=None)
    response = response_of(CLIPPED, result(), unanswered)
    response.save(tmp_path / "saved.parquet")
    table = response.to_arrow()
    assert table["message_log"].to_pylist()[0][1]["token_ids"] == [3, 4]
    assert table["total_reward"].to_pylist() == [1.0, 1.0, None]
    for metrics in (table["metrics"].to_pylist(), pq.read_table(tmp_path / "saved.parquet")["metrics"].to_pylist()):
        endings = [(row["finish_reason"], row["clipped"]) for row in metrics]
        assert endings == [("length", True), ("stop", False), (None, False)]


@pytest.mark.slow
def test_a_table_without_pyarrow_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from rollout_client import RolloutResponse\n"
        "RolloutResponse(request_id='r', metrics={}, policy={}, samples=[]).to_arrow()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last == 'ModuleNotFoundError: Arrow needs pyarrow: pip install "rollout-client[arrow]"'


def test_a_file_of_rollouts_without_a_summary_is_read_and_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    response_of(result(5)).save(path)
    path.write_bytes(path.read_bytes().splitlines()[0] + b"\n\n")
    assert [rollout.idx for rollout in read_rollouts(path)] == [5]
    with pytest.raises(ValueError, match=r"run.jsonl has no summary: a file that `save` wrote whole has one\."):
        RolloutResponse.load(path)


def test_a_file_is_read_with_a_byte_order_mark_and_with_any_character(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    response = response_of(result(5, answer="a\u2028b\x85c"))
    response.save(path)
    path.write_bytes(BYTE_ORDER_MARK + path.read_bytes())
    assert RolloutResponse.load(path) == response


def test_another_ending_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"saved.csv must end in .jsonl or .parquet"):
        response_of().save(tmp_path / "saved.csv")
    assert list(tmp_path.iterdir()) == []


def test_answers_are_read_as_they_came(tmp_path: Path) -> None:
    rollouts = [result(place, total_reward=float(place)) for place in range(2)]
    lines = [{"position": place, "sample": sample} for place, sample in enumerate(rollouts)]
    event = {"event": 1, "samples": lines}
    (tmp_path / "answer.json").write_text(json.dumps({**SUMMARY, "samples": rollouts}))
    (tmp_path / "stream.ndjson").write_text("".join(f"{json.dumps(row)}\n\n" for row in [*lines, {"summary": SUMMARY}]))
    (tmp_path / "job.ndjson").write_text(json.dumps(event) + "\n" + json.dumps({"event": 2, "summary": SUMMARY}) + "\n")
    expected = [SampleResult.model_validate(sample) for sample in rollouts]
    for name in ("answer.json", "stream.ndjson", "job.ndjson"):
        assert list(read_rollouts(tmp_path / name)) == expected, name
        assert RolloutResponse.load(tmp_path / name).request_id == "r1"


ROLLOUT = json.dumps(result())


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", '{"tasks": []}', "a.json is not an answer with rollouts: request_id: Field required."),
        ("a.ndjson", '{"tasks": []}\n', "a.ndjson line 1 is not a rollout: .*neither a line of an answer nor an event"),
        ("a.csv", "", "a.csv must end in .jsonl, .parquet, .json, .ndjson, which says how it is read."),
        (
            "a.jsonl",
            f'{ROLLOUT}\n\n{{"idx": 1}}\n',
            "a.jsonl line 3 is not a rollout: generation_index: Field required.",
        ),
        ("a.jsonl", f"{ROLLOUT}\n[]\n{ROLLOUT}\n", "a.jsonl line 2 is not a rollout: "),
        ("a.jsonl", f"{ROLLOUT}\n{ROLLOUT[:-9]}", "a.jsonl line 2 is not a rollout: Invalid JSON"),
        ("a.parquet", "text", "a.parquet is not a Parquet file: "),
    ],
)
def test_a_file_without_rollouts_is_named_in_a_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        list(read_rollouts(tmp_path / name))


def test_a_parquet_file_of_something_else_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"is not a file of rollouts: it has no column message_log, status"):
        list(read_rollouts(tmp_path / "other.parquet"))


def test_an_answer_that_ended_with_a_problem_raises_it(tmp_path: Path) -> None:
    (tmp_path / "stream.ndjson").write_text(json.dumps({"problem": REJECTED}) + "\n")
    with pytest.raises(RequestRejected, match="there is no task 'maths'"):
        list(read_rollouts(tmp_path / "stream.ndjson"))
