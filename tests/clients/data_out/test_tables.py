"""Responses as tables: what is a column, and how rewards, metrics and further fields are named."""

import subprocess
import sys
import textwrap

import pytest

from tests.clients.data_out.responses import response_of
from tests.clients.scripted_service import result

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
