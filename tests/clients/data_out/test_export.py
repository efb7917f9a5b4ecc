"""`export_rollouts`: the rows of each format, which rollouts are in none, and why."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import SampleResult
from rollout_client.data_out.export import ExportFormat, ExportSelection, NothingToExport, export_rollouts
from tests.clients.message_logs import GREEDY, generated
from tests.clients.scripted_service import Json, result
from tests.patterns import whole

ASKED: Json = {"role": "user", "content": "What is 1 + 1?", "token_ids": [1, 2]}
OBSERVED: Json = {"role": "environment", "content": "No.", "token_ids": [7]}
TOOLS: list[Json] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
LAST = ExportSelection(turns="last")
SEVERAL = "several responses, and the format trains on all between them: take the last with turns=last"
ALIKE = "no other response to its prompt has a reward that differs"


def said(text: str, *token_ids: int, **fields: Any) -> Json:
    return generated(*token_ids, content=text, finish_reason="stop") | fields


def played(reward: float | None, *messages: Json, generation: int = 0, **fields: Any) -> SampleResult:
    log = list(messages) or [ASKED, said(f"It is {generation}.", 3, 4)]
    return SampleResult.model_validate(result(0, generation, message_log=log, total_reward=reward) | fields)


def group(*rewards: float | None, **fields: Any) -> list[SampleResult]:
    """One group; rollout i says `It is i.`"""
    return [played(reward, generation=place, **fields) for place, reward in enumerate(rewards)]


def two_turns(reward: float = 1.0, first: str = "Three.", generation: int = 0) -> SampleResult:
    """It ends with what the environment said after the last response."""
    log = [ASKED, said(first, 3, 4), OBSERVED, said(f"Two, {generation}.", 5, 6), OBSERVED]
    return played(reward, *log, generation=generation)


def chat(role: str, content: str) -> Json:
    return {"role": role, "content": content}


PROMPT = [chat("user", "What is 1 + 1?")]
RED, BLUE = (f"sha256:{digit * 64}" for digit in "ab")
WORDS: Json = {"type": "text", "text": "What is 1 + 1?"}
PICTURE: Json = {"type": "image"}


def showing(message: Json, *names: str) -> Json:
    return message | {"mm_ranges": [{"media": name, "start": 0, "end": 1} for name in names]}


def seen(reward: float = 1.0, *names: str, generation: int = 0) -> SampleResult:
    """A rollout whose prompt shows these images, by default a red one."""
    log = [showing(ASKED, *(names or (RED,))), said(f"It is {generation}.", 3, 4)]
    return played(reward, *log, generation=generation)


def answer(text: str) -> Json:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


# Rows


def test_sft_has_the_prompt_and_all_from_the_first_response_to_the_last() -> None:
    exported = export_rollouts([two_turns()], "sft")
    turns = [chat("assistant", "Three."), chat("environment", "No."), chat("assistant", "Two, 0.")]
    assert exported.rows == [{"prompt": PROMPT, "completion": turns}]
    assert exported.notes == {"rows with several responses: train them with assistant_only_loss=True": 1}
    [row] = export_rollouts([two_turns()], "sft", LAST).rows
    assert row == {"prompt": [*PROMPT, *turns[:2]], "completion": turns[2:]}


def test_tokens_label_the_responses_alone_or_the_last_one() -> None:
    tokens = [1, 2, 3, 4, 7, 5, 6]
    [row] = export_rollouts([two_turns()], "tokens").rows
    assert row == {"input_ids": tokens, "labels": [-100, -100, 3, 4, -100, 5, 6]}
    [last] = export_rollouts([two_turns()], "tokens", LAST).rows
    assert last == {"input_ids": tokens, "labels": [-100] * 5 + [5, 6]}


def test_dpo_pairs_the_best_with_the_worst_of_a_group() -> None:
    exported = export_rollouts(group(0.5, 0.0, 1.0), "dpo")
    chosen, rejected = [chat("assistant", "It is 2.")], [chat("assistant", "It is 1.")]
    assert exported.rows == [{"prompt": PROMPT, "chosen": chosen, "rejected": rejected}]
    assert (exported.rollouts, exported.left_out) == (3, {"its group has its pairs without it": 1})


def test_parsed_calls_and_reasoning_are_fields_of_the_message() -> None:
    parsed = {"tool_calls": [CALL], "reasoning_content": "Hm.", "parsed_content": "I add."}
    tool: Json = {"role": "tool", "content": "2", "token_ids": [8], "tool_call_id": "c1", "name": "add"}
    calling = said("<think>Hm.</think>I add.<tool_call>{}</tool_call>", 3, **parsed)
    [row] = export_rollouts([played(1.0, ASKED, calling, tool, said("Two.", 4), tools=TOOLS)], "sft").rows
    read: Json = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    message: Json = chat("assistant", "I add.") | {"reasoning_content": "Hm."}
    answer = chat("tool", "2") | {"name": "add", "tool_call_id": "c1"}
    assert row["completion"] == [message | {"tool_calls": [read]}, answer, chat("assistant", "Two.")]
    assert json.loads(str(row["tools"])) == TOOLS


def test_every_row_has_variables_for_the_chat_template_if_one_has() -> None:
    thinking = {"enable_thinking": False}
    exported = export_rollouts([played(1.0), played(1.0, chat_template_kwargs=thinking)], "sft")
    assert [row["chat_template_kwargs"] for row in exported.rows] == [{}, thinking]


def test_each_seat_of_a_game_is_a_row_with_its_own_reward() -> None:
    second = {"message_log": [ASKED, said("I lost.", 5)], "rewards": {"seat_1": -1.0}}
    [row] = export_rollouts([played(1.0, rewards={"seat_0": 1.0}, branches=[second])], "dpo").rows
    assert (row["chosen"], row["rejected"]) == ([chat("assistant", "It is 0.")], [chat("assistant", "I lost.")])


def test_branches_of_agents_are_in_no_row_and_are_counted() -> None:
    branch = {"message_log": [ASKED, said("Aside.", 9)]}
    exported = export_rollouts([played(1.0, branches=[branch, branch])], "tokens")
    assert (len(exported.rows), exported.notes) == (1, {"branches of agents, which are in no row": 2})


@pytest.mark.parametrize("format", ["sft", "dpo", "tokens"])
def test_rows_come_back_from_json_lines_and_no_other_file_is_written(format: ExportFormat, tmp_path: Path) -> None:
    exported = export_rollouts(group(1.0, 0.0), format)
    exported.save(tmp_path / "rows.jsonl")
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == exported.rows
    with pytest.raises(ValueError, match=r"must end in \.jsonl: a column would give each message the fields of all"):
        exported.save(tmp_path / "rows.parquet")


# Pairs


@pytest.mark.parametrize(
    ("min_gap", "pairs"), [(0.0, [(2, 1), (2, 0), (0, 1)]), (0.5, [(2, 1), (2, 0)]), (1.0, [(2, 1)])]
)
def test_pairs_have_at_least_the_gap_the_largest_first(min_gap: float, pairs: list[tuple[int, int]]) -> None:
    exported = export_rollouts(group(0.25, 0.0, 1.0), "dpo", ExportSelection(min_gap=min_gap, pairs_per_group=9))
    found: list[Any] = [(row["chosen"], row["rejected"]) for row in exported.rows]
    assert [tuple(int(one[0]["content"][6]) for one in both) for both in found] == pairs
    assert exported.left_out == ({} if min_gap < 1 else {f"{ALIKE} by 1": 1})


rewards = st.lists(st.sampled_from([None, 0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=6)


@given(rewards, st.sampled_from([0.0, 0.25, 0.75]), st.integers(1, 20))
def test_a_rollout_is_in_a_pair_or_left_out(rewards: list[float | None], min_gap: float, pairs_per_group: int) -> None:
    rollouts = group(*rewards)
    selection = ExportSelection(min_gap=min_gap, pairs_per_group=pairs_per_group)
    final = [reward for reward in rewards if reward is not None]
    apart = sum(one - other >= max(min_gap, 1e-9) for one in final for other in final)
    if not apart:
        with pytest.raises(NothingToExport) as nothing:
            export_rollouts(rollouts, "dpo", selection)
        assert sum(nothing.value.left_out.values()) == len(rollouts)
        return
    exported = export_rollouts(rollouts, "dpo", selection)
    assert len(exported.rows) == min(apart, pairs_per_group)
    paired = {str(row[side]) for row in exported.rows for side in ("chosen", "rejected")}
    assert len(paired) + sum(exported.left_out.values()) == len(rollouts)


def test_equal_responses_with_other_rewards_are_no_pair() -> None:
    log = [ASKED, said("Two.", 3)]
    with pytest.raises(NothingToExport) as nothing:
        export_rollouts([played(1.0, *log), played(0.0, *log, generation=1)], "dpo")
    assert nothing.value.left_out == {ALIKE: 2}


def test_a_preference_of_several_turns_is_one_of_the_last_turn() -> None:
    rollouts = [two_turns(1.0), two_turns(0.0, generation=1), two_turns(0.5, "Four.", generation=2)]
    with pytest.raises(NothingToExport) as nothing:
        export_rollouts(rollouts, "dpo")
    assert nothing.value.left_out == {SEVERAL: 3}
    exported = export_rollouts(rollouts, "dpo", LAST)
    [row] = exported.rows
    assert (row["chosen"], row["rejected"]) == ([chat("assistant", "Two, 0.")], [chat("assistant", "Two, 1.")])
    assert exported.left_out == {ALIKE: 1}


def test_the_best_of_a_group_makes_no_pair() -> None:
    with pytest.raises(ValueError, match="best_of_group keeps one rollout of each group"):
        export_rollouts(group(1.0, 0.0), "dpo", ExportSelection(best_of_group=True))


# Selection


def test_the_best_of_each_group_is_kept_by_row_and_prompt() -> None:
    other = [ASKED | {"content": "Another."}, said("It is 7.", 3)]
    rollouts = [*group(0.0, 1.0, 1.0), played(0.5, *other), *group(0.25, input_row=3), *group(None)]
    exported = export_rollouts(rollouts, "sft", ExportSelection(best_of_group=True))
    assert [row["completion"] for row in exported.rows] == [
        [chat("assistant", "It is 1.")],
        [chat("assistant", "It is 7.")],
        [chat("assistant", "It is 0.")],
    ]
    assert exported.left_out == {"no final reward": 1, "not the best of its group": 2}


def test_statuses_and_least_rewards_select_and_the_rest_is_counted() -> None:
    rollouts = [
        played(1.0),
        played(0.0),
        played(1.0, status="truncated"),
        played(1.0, status="deadline"),
        played(None, status="error"),
        played(1.0, ASKED),
        played(1.0, said("Unasked.", 3)),
    ]
    exported = export_rollouts(rollouts, "sft", ExportSelection(statuses=["completed", "deadline"], min_reward=0.5))
    assert (len(exported.rows), exported.rollouts) == (1, 7)
    assert exported.left_out == {
        "a reward below 0.5": 1,
        "status truncated": 1,
        "no final reward": 1,
        "status error": 1,
        "no response": 1,
        "no prompt": 1,
    }
    assert len(export_rollouts(rollouts, "sft", ExportSelection(statuses=["completed", "deadline"])).rows) == 3


@pytest.mark.parametrize(
    ("format", "rollouts", "reasons"),
    [
        ("dpo", group(1.0, 1.0), f": 2 left out: {ALIKE}."),
        ("tokens", [played(1.0, ASKED, said("Two."))], ": 1 left out: no tokens of a response."),
        (
            "tokens",
            [played(1.0, ASKED, said("{}", 3, constrained=True))],
            ": 1 left out: no response that may be trained: each was constrained, or greedy in a request that samples.",
        ),
        ("sft", [], ": there are no rollouts."),
    ],
)
def test_no_row_is_an_error_that_says_why(format: ExportFormat, rollouts: list[SampleResult], reasons: str) -> None:
    with pytest.raises(NothingToExport, match=whole(f"Nothing can be exported as {format}{reasons}")) as nothing:
        export_rollouts(rollouts, format)
    assert str(pickle.loads(pickle.dumps(nothing.value))) == str(nothing.value)


def test_responses_that_were_not_sampled_freely_are_never_trained() -> None:
    forced = said("{}", 3, 4, constrained=True)
    sample = played(1.0, ASKED, forced, OBSERVED, said("Two.", 5, 6), OBSERVED, said("So.", 8, **GREEDY))
    [labelled] = export_rollouts([sample], "tokens").rows
    assert labelled == {"input_ids": [1, 2, 3, 4, 7, 5, 6], "labels": [-100] * 5 + [5, 6]}
    [chats] = export_rollouts([sample], "sft").rows
    assert chats["completion"] == [chat("assistant", "Two.")]


@pytest.mark.parametrize("format", ["sft", "dpo"])
def test_an_untrained_response_between_others_leaves_the_last_turn(format: ExportFormat) -> None:
    between = [said("{}", 5, constrained=True), OBSERVED]
    rollouts = [
        played(reward, ASKED, said(str(reward), 3), OBSERVED, *between, said(f"{reward}.", 6), generation=place)
        for place, reward in enumerate((0.0, 1.0))
    ]
    with pytest.raises(NothingToExport, match="2 left out: an assistant message that must not be trained"):
        export_rollouts(rollouts, format)
    alike = [played(reward, ASKED, *between, said(f"{reward}.", 6)) for reward in (0.0, 1.0)]
    assert export_rollouts(alike, format, LAST).rows


# Images


def test_images_are_names_and_parts_of_the_messages_of_every_row() -> None:
    plain = played(1.0, chat("system", "") | {"token_ids": [9]}, ASKED, said("Two.", 3))
    assert export_rollouts([seen(1.0, RED, BLUE), plain], "sft").rows == [
        {
            "prompt": [{"role": "user", "content": [PICTURE, PICTURE, WORDS]}],
            "completion": [answer("It is 0.")],
            "images": [RED, BLUE],
        },
        {
            "prompt": [{"role": "system", "content": []}, {"role": "user", "content": [WORDS]}],
            "completion": [answer("Two.")],
            "images": [],
        },
    ]
    [pair] = export_rollouts([seen(), seen(0.0, generation=1)], "dpo").rows
    assert pair == {
        "prompt": [{"role": "user", "content": [PICTURE, WORDS]}],
        "chosen": [answer("It is 0.")],
        "rejected": [answer("It is 1.")],
        "images": [RED],
    }


def test_files_of_images_stand_as_paths_and_a_missing_one_is_counted(tmp_path: Path) -> None:
    files = {RED: tmp_path / "red.png"}
    exported = export_rollouts([seen(), seen(1.0, BLUE)], "sft", image_file=files.get)
    assert [row["images"] for row in exported.rows] == [[str(files[RED])]]
    assert exported.left_out == {"an image that the service does not have any more": 1}


@pytest.mark.parametrize(
    ("form", "log", "reason"),
    [
        ("tokens", [showing(ASKED, RED)], "it shows images, and a row of tokens has no place for them"),
        ("sft", [ASKED, said("a", 5), showing(OBSERVED, RED)], "an image after the first trained response, and TRL"),
        ("sft", [showing(ASKED, RED), OBSERVED], "a message of role environment, which TRL takes in no row"),
        ("sft", [showing(chat("tool", "5") | {"token_ids": [5]}, RED)], "an image in a message of role tool"),
    ],
)
def test_images_that_a_format_does_not_take_are_counted(form: ExportFormat, log: list[Json], reason: str) -> None:
    with pytest.raises(NothingToExport, match=f"1 left out: {reason}"):
        export_rollouts([played(1.0, *log, said("b", 6))], form)
