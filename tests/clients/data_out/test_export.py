"""`export_rollouts`: the rows of each format, which rollouts are in none, and why."""

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import RolloutResponse, SampleResult, read_rollouts
from rollout_client.data_out.export import FORMATS, ExportFormat, ExportSelection, NothingToExport, export_rollouts
from rollout_client.errors import RequestRejected
from tests.clients.data_out.responses import responses
from tests.clients.scripted_service import REJECTED, SUMMARY, Json, result

ASKED: Json = {"role": "user", "content": "What is 1 + 1?", "token_ids": [1, 2]}
OBSERVED: Json = {"role": "environment", "content": "No.", "token_ids": [7]}
TOOLS: list[Json] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def said(text: str, *token_ids: int, **fields: Any) -> Json:
    logprobs = [-0.5] * len(token_ids)
    generated = {"token_ids": list(token_ids), "generation_logprobs": logprobs, "finish_reason": "stop"}
    return {"role": "assistant", "content": text} | generated | fields


def played(reward: float | None, *messages: Json, generation: int = 0, **fields: Any) -> SampleResult:
    log = list(messages) or [ASKED, said(f"It is {generation}.", 3, 4)]
    played = result(0, generation, message_log=log, total_reward=reward)
    return SampleResult.model_validate(played | fields)


def group(*rewards: float | None, **fields: Any) -> list[SampleResult]:
    """One group; rollout i says `It is i.`"""
    return [played(reward, generation=place, **fields) for place, reward in enumerate(rewards)]


def two_turns(reward: float = 1.0, first: str = "Three.", generation: int = 0) -> SampleResult:
    """It ends with what the environment said after the last response."""
    log = [ASKED, said(first, 3, 4), OBSERVED, said(f"Two, {generation}.", 5, 6), OBSERVED]
    return played(reward, *log, generation=generation)


COLD: Json = {"temperature": 0.0}


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


def test_rows_of_trl_have_their_images_by_name_and_parts_for_them_in_every_row() -> None:
    plain = played(1.0, chat("system", "") | {"token_ids": [9]}, ASKED, said("Two.", 3))
    exported = export_rollouts([seen(1.0, RED, BLUE), plain], "sft")
    assert exported.rows == [
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
    assert export_rollouts([seen()], "kto").rows[0]["label"] is True
    [pair] = export_rollouts([seen(), seen(0.0, generation=1)], "dpo").rows
    assert pair == {
        "prompt": [{"role": "user", "content": [PICTURE, WORDS]}],
        "chosen": [answer("It is 0.")],
        "rejected": [answer("It is 1.")],
        "images": [RED],
    }


def test_prompts_with_other_images_are_other_prompts() -> None:
    with pytest.raises(NothingToExport, match="2 left out: no reward of its group differs"):
        export_rollouts([seen(), seen(0.0, BLUE, generation=1)], "dpo")


def test_verl_has_a_word_for_each_image_in_the_text_and_openai_a_part() -> None:
    looked = [showing(ASKED, RED), said("It is 0.", 3, 4), showing(OBSERVED, BLUE), said("Ah.", 5)]
    exported = export_rollouts([played(1.0, *looked), played(1.0)], "verl")
    assert exported.rows == [
        {
            "messages": [
                chat("user", "<image>What is 1 + 1?"),
                chat("assistant", "It is 0."),
                chat("environment", "<image>No."),
                chat("assistant", "Ah."),
            ],
            "images": [{"image": RED}, {"image": BLUE}],
        },
        {"messages": [*PROMPT, chat("assistant", "It is 0.")], "images": []},
    ]
    [row] = export_rollouts([played(1.0, *looked)], "openai").rows
    urls = [{"type": "image_url", "image_url": {"url": name}} for name in (RED, BLUE)]
    assert row["messages"] == [
        {"role": "user", "content": [urls[0], WORDS]},
        {"role": "assistant", "content": "It is 0.", "weight": 1},
        {"role": "user", "content": [urls[1], {"type": "text", "text": "No."}]},
        {"role": "assistant", "content": "Ah.", "weight": 1},
    ]


def test_files_stand_as_paths_and_in_openais_form_as_data_urls(tmp_path: Path) -> None:
    red = tmp_path / "red.png"
    red.write_bytes(b"\x89PNG")
    files = {RED: red}
    assert export_rollouts([seen()], "sft", image_file=files.get).rows[0]["images"] == [str(red)]
    assert export_rollouts([seen()], "verl", image_file=files.get).rows[0]["images"] == [{"image": str(red)}]
    [row] = export_rollouts([seen()], "openai", image_file=files.get).rows
    messages: Any = row["messages"]
    assert messages[0]["content"][0]["image_url"] == {"url": "data:image/png;base64,iVBORw=="}
    for form in ("sft", "dpo", "kto", "verl", "openai"):
        with pytest.raises(NothingToExport, match="an image that the service does not have any more"):
            export_rollouts([seen(1.0, BLUE), seen(0.0, BLUE, generation=1)], form, image_file=files.get)


@pytest.mark.parametrize(
    ("form", "log", "reason"),
    [
        ("trl", [showing(ASKED, RED)], "it shows images, and a row of tokens has no place for them"),
        ("tinker", [showing(ASKED, RED)], "it shows images, and a row of tokens has no place for them"),
        (
            "verl",
            [showing(ASKED, RED), chat("user", "an <image>") | {"token_ids": [5]}],
            "a text with <image> or <video>",
        ),
        ("sft", [ASKED, said("a", 5), showing(OBSERVED, RED)], "an image after the first trained response, and TRL"),
        (
            "sft",
            [showing(ASKED, RED), OBSERVED],
            "a message of role environment, which TRL takes in no row with images",
        ),
        ("kto", [showing(chat("tool", "5") | {"token_ids": [5]}, RED)], "an image in a message of role tool"),
        ("openai", [showing(chat("tool", "5") | {"token_ids": [5]}, RED)], "an image in a message of role tool"),
    ],
)
def test_images_where_a_format_has_no_place_are_left_out_and_counted(
    form: ExportFormat, log: list[Json], reason: str
) -> None:
    with pytest.raises(NothingToExport, match=f"1 left out: {reason}"):
        export_rollouts([played(1.0, *log, said("b", 6))], form)


def test_sft_has_the_prompt_and_what_came_from_the_first_response_to_the_last() -> None:
    exported = export_rollouts([two_turns()], "sft")
    turns = [chat("assistant", "Three."), chat("environment", "No."), chat("assistant", "Two, 0.")]
    assert exported.rows == [{"prompt": PROMPT, "completion": turns}]
    assert exported.notes == {"rows with several responses: train them with assistant_only_loss=True": 1}


def test_the_last_turn_alone_has_the_earlier_ones_in_its_prompt() -> None:
    [row] = export_rollouts([two_turns()], "sft", ExportSelection(turns="last")).rows
    assert row["prompt"] == [*PROMPT, chat("assistant", "Three."), chat("environment", "No.")]
    assert row["completion"] == [chat("assistant", "Two, 0.")]


def test_trl_labels_the_tokens_of_the_responses_alone() -> None:
    [row] = export_rollouts([two_turns()], "trl").rows
    assert row == {"input_ids": [1, 2, 3, 4, 7, 5, 6], "labels": [-100, -100, 3, 4, -100, 5, 6]}
    [last] = export_rollouts([two_turns()], "trl", ExportSelection(turns="last")).rows
    assert last == {"input_ids": [1, 2, 3, 4, 7, 5, 6], "labels": [-100, -100, -100, -100, -100, 5, 6]}


def test_tinker_predicts_each_token_from_those_before_it() -> None:
    [row] = export_rollouts([two_turns()], "tinker").rows
    assert row == {
        "model_input": [1, 2, 3, 4, 7, 5],
        "loss_fn_inputs": {"target_tokens": [2, 3, 4, 7, 5, 6], "weights": [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]},
    }


@given(responses, st.sampled_from(["all", "last"]))
def test_trl_and_tinker_train_the_same_tokens(response: RolloutResponse, turns: Any) -> None:
    try:
        tinker = export_rollouts(response.samples, "tinker", ExportSelection(turns=turns)).rows
    except NothingToExport:
        return
    trl: list[Any] = export_rollouts(response.samples, "trl", ExportSelection(turns=turns)).rows
    trained = [[label for label in row["labels"][1:] if label != -100] for row in trl if len(row["labels"]) > 1]
    inputs: list[Any] = [row["loss_fn_inputs"] for row in tinker]
    pairs = [zip(each["target_tokens"], each["weights"], strict=True) for each in inputs]
    assert [[token for token, weight in pair if weight] for pair in pairs] == trained


def test_openai_weighs_the_responses_and_lets_the_user_say_what_the_environment_said() -> None:
    few_shot = chat("assistant", "Hello.") | {"token_ids": [9]}
    rollout = played(1.0, ASKED, few_shot, ASKED, said("Two.", 5), OBSERVED, said("2", 6), tools=TOOLS)
    [row] = export_rollouts([rollout], "openai").rows
    assert row["tools"] == TOOLS
    assert row["messages"] == [
        *PROMPT,
        chat("assistant", "Hello.") | {"weight": 0},
        *PROMPT,
        chat("assistant", "Two.") | {"weight": 1},
        chat("user", "No."),
        chat("assistant", "2") | {"weight": 1},
    ]


def test_calls_and_reasoning_are_fields_and_their_arguments_objects_where_templates_write_them() -> None:
    parsed = {"tool_calls": [CALL], "reasoning_content": "Hm.", "parsed_content": "I add."}
    tool: Json = {"role": "tool", "content": "2", "token_ids": [8], "tool_call_id": "c1", "name": "add"}
    calling = said("<think>Hm.</think>I add.<tool_call>{}</tool_call>", 3, **parsed)
    rollouts = [played(1.0, ASKED, calling, tool, said("Two.", 4), tools=TOOLS)]
    [row] = export_rollouts(rollouts, "sft").rows
    read: Json = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    message: Json = chat("assistant", "I add.") | {"reasoning_content": "Hm."}
    answer = chat("tool", "2") | {"name": "add", "tool_call_id": "c1"}
    assert row["completion"] == [message | {"tool_calls": [read]}, answer, chat("assistant", "Two.")]
    assert json.loads(str(row["tools"])) == TOOLS
    exported = export_rollouts(rollouts, "openai")
    asked: Any = exported.rows[0]["messages"]
    assert asked[1] == chat("assistant", "I add.") | {"tool_calls": [CALL], "weight": 1}
    assert exported.notes == {"rows whose reasoning is left out: the format has no place for it": 1}


def test_kto_labels_each_rollout_by_its_reward() -> None:
    exported = export_rollouts(group(1.0, 0.25, None), "kto", ExportSelection(passes_at=0.5))
    assert [(row["completion"], row["label"]) for row in exported.rows] == [
        ([chat("assistant", "It is 0.")], True),
        ([chat("assistant", "It is 1.")], False),
    ]
    assert exported.left_out == {"no final reward": 1}


def test_dpo_pairs_the_best_with_the_worst_of_a_group() -> None:
    exported = export_rollouts(group(0.5, 0.0, 1.0), "dpo")
    chosen, rejected = [chat("assistant", "It is 2.")], [chat("assistant", "It is 1.")]
    assert exported.rows == [{"prompt": PROMPT, "chosen": chosen, "rejected": rejected}]
    assert (exported.rollouts, exported.left_out) == (3, {"its group has its pairs without it": 1})


@pytest.mark.parametrize(
    ("min_gap", "pairs"),
    [(0.0, [(2, 1), (2, 0), (0, 1)]), (0.5, [(2, 1), (2, 0)]), (1.0, [(2, 1)])],
)
def test_pairs_have_at_least_the_gap_the_largest_first(min_gap: float, pairs: list[tuple[int, int]]) -> None:
    exported = export_rollouts(group(0.25, 0.0, 1.0), "dpo", ExportSelection(min_gap=min_gap, pairs_per_group=9))
    found: list[Any] = [(row["chosen"], row["rejected"]) for row in exported.rows]
    assert [tuple(int(one[0]["content"][6]) for one in both) for both in found] == pairs
    assert exported.left_out == ({} if min_gap < 1 else {"no reward of its group differs by 1": 1})


rewards = st.lists(st.sampled_from([None, 0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=6)


@given(rewards, st.sampled_from([0.0, 0.25, 0.75]), st.integers(1, 20))
def test_every_rollout_is_in_a_pair_or_counted_as_left_out(
    rewards: list[float | None], min_gap: float, pairs_per_group: int
) -> None:
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
    assert nothing.value.left_out == {"every other reward of its group has an equal response or another prompt": 2}


@pytest.mark.parametrize("format", ["dpo", "kto"])
def test_a_preference_of_several_turns_is_one_of_the_last_turn(format: ExportFormat) -> None:
    rollouts = [two_turns(1.0), two_turns(0.0, generation=1), two_turns(0.5, "Four.", generation=2)]
    with pytest.raises(NothingToExport) as nothing:
        export_rollouts(rollouts, format)
    assert nothing.value.left_out == {
        "several responses, and the format trains on all between them: take the last with turns=last": 3
    }
    exported = export_rollouts(rollouts, format, ExportSelection(turns="last"))
    completions = {"dpo": [("Two, 0.", "Two, 1.")], "kto": [("Two, 0.",), ("Two, 1.",), ("Two, 2.",)]}[format]
    rows: list[Any] = exported.rows
    sides = ("chosen", "rejected") if format == "dpo" else ("completion",)
    assert [tuple(row[side][0]["content"] for side in sides) for row in rows] == completions
    if format == "dpo":
        assert exported.left_out == {"every other reward of its group has an equal response or another prompt": 1}


def test_the_best_of_a_group_is_kept_and_groups_are_told_apart_by_row_and_prompt() -> None:
    other = [ASKED | {"content": "Another."}, said("It is 7.", 3)]
    rollouts = [
        *group(0.0, 1.0, 1.0),
        played(0.5, *other),
        *group(0.25, input_row=3),
        *group(None),
    ]
    exported = export_rollouts(rollouts, "sft", ExportSelection(best_of_group=True))
    assert [row["completion"] for row in exported.rows] == [
        [chat("assistant", "It is 1.")],
        [chat("assistant", "It is 7.")],
        [chat("assistant", "It is 0.")],
    ]
    assert exported.left_out == {"no final reward": 1, "not the best of its group": 2}


def test_statuses_and_least_rewards_select_and_what_is_left_out_is_counted_by_reason() -> None:
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
    ("format", "rollouts", "sentence"),
    [
        ("dpo", group(1.0, 1.0), "Nothing can be exported as dpo: 2 left out: no reward of its group differs."),
        ("kto", group(None), "Nothing can be exported as kto: 1 left out: no final reward."),
        (
            "trl",
            [played(1.0, ASKED, said("Two."))],
            "Nothing can be exported as trl: 1 left out: no tokens of a response.",
        ),
        (
            "tinker",
            [played(1.0, said("Two.", 3))],
            "Nothing can be exported as tinker: 1 left out: no token before the response's.",
        ),
        ("sft", [], "Nothing can be exported as sft: there are no rollouts."),
    ],
)
def test_what_gives_no_row_at_all_is_an_error_that_says_why(
    format: ExportFormat, rollouts: list[SampleResult], sentence: str
) -> None:
    with pytest.raises(NothingToExport) as nothing:
        export_rollouts(rollouts, format)
    assert str(nothing.value) == sentence
    assert str(pickle.loads(pickle.dumps(nothing.value))) == sentence


def test_the_best_of_a_group_makes_no_pair() -> None:
    with pytest.raises(ValueError, match="best_of_group keeps one rollout of each group"):
        export_rollouts(group(1.0, 0.0), "dpo", ExportSelection(best_of_group=True))


def test_each_seat_of_a_game_is_a_row_with_its_own_reward() -> None:
    second = {"message_log": [ASKED, said("I lost.", 5)], "rewards": {"seat_1": -1.0}}
    exported = export_rollouts([played(1.0, rewards={"seat_0": 1.0}, branches=[second])], "kto")
    assert [(row["completion"], row["label"]) for row in exported.rows] == [
        ([chat("assistant", "It is 0.")], True),
        ([chat("assistant", "I lost.")], False),
    ]
    assert (exported.rollouts, exported.notes) == (2, {})


def test_branches_of_agents_are_in_no_row_and_are_counted() -> None:
    branch = {"message_log": [ASKED, said("Aside.", 9)]}
    exported = export_rollouts([played(1.0, branches=[branch, branch])], "trl")
    assert (len(exported.rows), exported.notes) == (1, {"branches of agents, which are in no row": 2})


def test_verl_reads_messages_from_parquet_as_they_were_written(tmp_path: Path) -> None:
    thinking: Json = {"chat_template_kwargs": {"enable_thinking": False}}
    exported = export_rollouts([two_turns(), played(1.0, tools=TOOLS, **thinking)], "verl")
    exported.save(tmp_path / "rows.parquet")
    first, second = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    turns = [chat("assistant", "Three."), chat("environment", "No."), chat("assistant", "Two, 0.")]
    assert first == {"messages": [*PROMPT, *turns], "tools": None, "enable_thinking": None}
    answer = [chat("assistant", "It is 0.")]
    assert second == {"messages": [*PROMPT, *answer], "tools": TOOLS, "enable_thinking": False}


def test_verl_takes_no_message_that_it_must_not_train() -> None:
    few_shot = chat("assistant", "Hello.") | {"token_ids": [9]}
    with pytest.raises(NothingToExport, match="1 left out: an assistant message that must not be trained"):
        export_rollouts([played(1.0, ASKED, few_shot, ASKED, said("Two.", 5))], "verl")
    with pytest.raises(NothingToExport, match="1 left out: an assistant message that must not be trained"):
        export_rollouts([two_turns()], "verl", ExportSelection(turns="last"))


def test_what_was_not_sampled_freely_is_trained_in_no_format() -> None:
    forced = said("{}", 3, 4, constrained=True)
    sample = played(1.0, ASKED, forced, OBSERVED, said("Two.", 5, 6), OBSERVED, said("So.", 8, sampled_with=COLD))
    [labelled] = export_rollouts([sample], "trl").rows
    assert labelled == {"input_ids": [1, 2, 3, 4, 7, 5, 6], "labels": [-100] * 5 + [5, 6]}
    datum: Any = export_rollouts([sample], "tinker").rows[0]
    assert datum["loss_fn_inputs"]["weights"] == [0, 0, 0, 0, 1, 1]
    chats: Any = export_rollouts([sample], "openai").rows[0]
    assert [message.get("weight") for message in chats["messages"]] == [None, 0, None, 1]
    sft: Any = export_rollouts([sample], "sft").rows[0]
    assert [message["content"] for message in sft["completion"]] == ["Two."]
    with pytest.raises(NothingToExport, match="1 left out: an assistant message that must not be trained"):
        export_rollouts([sample], "verl")


@pytest.mark.parametrize("format", ["sft", "kto", "dpo"])
def test_a_response_between_others_that_must_not_be_trained_gives_no_row_but_of_the_last_turn(
    format: ExportFormat,
) -> None:
    between = [said("{}", 5, constrained=True), OBSERVED]
    rollouts = [
        played(reward, ASKED, said(str(reward), 3), OBSERVED, *between, said(f"{reward}.", 6), generation=place)
        for place, reward in enumerate((0.0, 1.0))
    ]
    with pytest.raises(NothingToExport):
        export_rollouts(rollouts, format)
    alike = [played(reward, ASKED, *between, said(f"{reward}.", 6)) for reward in (0.0, 1.0)]
    assert export_rollouts(alike, format, ExportSelection(turns="last")).rows


def test_a_rollout_of_which_nothing_may_be_trained_is_left_out_with_its_reason() -> None:
    with pytest.raises(NothingToExport, match="1 left out: no response that may be trained: each was constrained"):
        export_rollouts([played(1.0, ASKED, said("{}", 3, constrained=True))], "tinker")


def test_verl_reads_no_json_lines_and_tools_that_a_column_would_change_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.parquet: verl reads nothing else"):
        export_rollouts([played(1.0)], "verl").save(tmp_path / "rows.jsonl")
    other = [{"type": "function", "function": {"name": "find", "description": "Finds."}}]
    exported = export_rollouts([played(1.0, tools=TOOLS + other)], "verl")
    with pytest.raises(ValueError, match="The tools of these rollouts have different fields"):
        exported.save(tmp_path / "rows.parquet")


@pytest.mark.parametrize("format", sorted(set(FORMATS) - {"verl"}))
def test_rows_come_back_from_json_lines(format: ExportFormat, tmp_path: Path) -> None:
    exported = export_rollouts(group(1.0, 0.0), format)
    exported.save(tmp_path / "rows.jsonl")
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == exported.rows


def test_parquet_holds_tokens_and_no_messages_with_fields_of_their_own(tmp_path: Path) -> None:
    exported = export_rollouts(group(1.0, 0.0), "trl")
    exported.save(tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == exported.rows
    with pytest.raises(ValueError, match=r"must end in \.jsonl: a column would give each message the fields of all"):
        export_rollouts(group(1.0, 0.0), "openai").save(tmp_path / "rows.parquet")


def test_every_row_has_variables_for_the_chat_template_if_one_has() -> None:
    thinking = {"enable_thinking": False}
    exported = export_rollouts([played(1.0), played(1.0, chat_template_kwargs=thinking)], "sft")
    assert [row["chat_template_kwargs"] for row in exported.rows] == [{}, thinking]


def test_answers_are_read_as_they_came(tmp_path: Path) -> None:
    rollouts = [result(place, total_reward=float(place)) for place in range(2)]
    lines = [{"position": place, "sample": sample} for place, sample in enumerate(rollouts)]
    event = {"event": 1, "samples": lines}
    (tmp_path / "answer.json").write_text(json.dumps({**SUMMARY, "samples": rollouts}))
    (tmp_path / "stream.ndjson").write_text(
        "".join(f"{json.dumps(line)}\n\n" for line in [*lines, {"summary": SUMMARY}])
    )
    (tmp_path / "job.ndjson").write_text(json.dumps(event) + "\n" + json.dumps({"event": 2, "summary": SUMMARY}) + "\n")
    expected = [SampleResult.model_validate(sample) for sample in rollouts]
    for name in ("answer.json", "stream.ndjson", "job.ndjson"):
        assert list(read_rollouts(tmp_path / name)) == expected, name
        assert RolloutResponse.load(tmp_path / name).request_id == "r1"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", '{"tasks": []}', "a.json is not an answer with rollouts: request_id: Field required."),
        ("a.ndjson", '{"tasks": []}\n', "a.ndjson line 1 is not a rollout: .*neither a line of an answer nor an event"),
        ("a.csv", "", "a.csv must end in .jsonl, .parquet, .json, .ndjson, which says how it is read."),
    ],
)
def test_a_file_without_rollouts_is_named_in_a_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        list(read_rollouts(tmp_path / name))


def test_an_answer_that_ended_with_a_problem_raises_it(tmp_path: Path) -> None:
    (tmp_path / "stream.ndjson").write_text(json.dumps({"problem": REJECTED}) + "\n")
    with pytest.raises(RequestRejected, match="there is no task 'maths'"):
        list(read_rollouts(tmp_path / "stream.ndjson"))
