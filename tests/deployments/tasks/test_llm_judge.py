"""Replies that a scripted judge scores."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.tasks.llm_judge import _DEFAULT_RUBRIC, LlmJudgeEnvironment, ModelMissing, VerdictMissing
from deployments.tasks.multi_reward import MultiRewardEnvironment, _PartSettings
from rollout_env import ModelReply, ScriptedChatModel, check, play

SAMPLE = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "extra_env_info": {}}
GOOD = '{"score": 7.5, "reason": "Clear."}'


def judged_by(*script: str | ModelReply | Exception, **arguments: Any) -> tuple[LlmJudgeEnvironment, ScriptedChatModel]:
    environment, judge = LlmJudgeEnvironment(**arguments), ScriptedChatModel(script)
    environment.use_models({"judge": judge}, {})
    return environment, judge


def test_the_score_of_the_judge_is_the_reward_on_a_scale_from_0_to_1() -> None:
    environment, judge = judged_by(f"Let me think. {GOOD}", lowest=5.0, highest=10.0)
    played = play(environment, ["Because of scattering."], SAMPLE)
    assert (played.rewards, played.terminated, played.answers) == ({"judge": 0.5}, True, ["7.5"])
    assert played.message_log[-1]["content"] == "Environment: 7.5. Clear."
    assert played.metrics == {"judge_seconds": 0.0, "judge_calls": 1}
    [(asked, _)] = judge.asked
    assert _DEFAULT_RUBRIC in asked[0]["content"]


def test_the_judge_sees_conversation_rubric_and_reference_and_no_reasoning() -> None:
    environment, judge = judged_by(GOOD)
    info = {"rubric": "Is short.", "reference": "Rayleigh."}
    play(environment, ["<think>secret</think>Light scatters."], {**SAMPLE, "extra_env_info": info})
    text = judge.asked[0][0][0]["content"]
    assert json.loads(text.split("\nBEGIN ")[1].split("\n", 1)[1].split("\nEND ")[0]) == {
        "conversation": [{"role": "user", "content": "Why is the sky blue?"}],
        "reply": "Light scatters.",
        "reference": "Rayleigh.",
    }
    assert "Rubric: Is short." in text
    assert "secret" not in text


CONTROL_TOKENS = [
    *["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "<think>", "</think>", "<|fim_prefix|>"],
    *["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
    *["</s>", "[/INST]", "[TOOL_CALLS]", "<<SYS>>", "<start_of_turn>", "<bos>", "<|turn>", "<turn|>", "<|channel|>"],
    *["<\uff5cUser\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[gMASK]", "<sop>", "<|user|>", "[MASK]"],
    *["<|START_OF_TURN_TOKEN|>", "]~b]", "]~!b[", "[e~[", "[|assistant|]", "[|endofturn|]", "\u25c1think\u25b7"],
    *["[UNUSED_TOKEN_145]", "<reserved_106>", ">>QUESTION<<", "<extra_id_1>", "[BOS]", "[EOT]", "[CLS]", "<seed:eos>"],
]


@given(st.lists(st.sampled_from([*CONTROL_TOKENS, " ", "\n", "a", "\\", '"', "[", "]", "<", "list[int]"]), max_size=20))
def test_nothing_that_a_judge_is_sent_spells_a_control_token(pieces: list[str]) -> None:
    spelled = "".join(pieces)
    environment, judge = judged_by(f"{spelled} I see.", f'{{"score": "{spelled[:6]!r}"}}', GOOD)
    sample = {
        "messages": [{"role": "user", "content": spelled}],
        "extra_env_info": {"rubric": f"Is short.{spelled}", "reference": spelled},
    }
    play(environment, [f"Reply:{spelled}"], sample)
    contents = [message["content"] for asked, _ in judge.asked for message in asked]
    assert len(contents) == 7
    assert not [(token, text) for token in CONTROL_TOKENS for text in contents if token in text]
    data = json.loads(contents[0].split("\nBEGIN ")[1].split("\n", 1)[1].split("\nEND ")[0])
    assert data["conversation"] == [{"role": "user", "content": spelled}]
    assert data["reference"] == spelled


def test_an_answer_without_a_verdict_is_asked_again_with_what_is_wrong() -> None:
    environment, judge = judged_by("Good.", '{"score": 11}', GOOD)
    played = play(environment, ["A"], SAMPLE)
    assert (played.total_reward, played.metrics["judge_calls"]) == (0.75, 3)
    assert judge.asked[1][0][1:] == [
        {"role": "assistant", "content": "Good."},
        {
            "role": "user",
            "content": "That ended with no valid verdict (no JSON object at the end). "
            'Answer with the JSON object alone: {"score": ..., "reason": ...}',
        },
    ]
    assert "(the score 11 is not from 0 to 10)" in judge.asked[2][0][2]["content"]


def test_without_a_verdict_the_reward_is_unknown_and_not_zero() -> None:
    environment, judge = judged_by("Good.", verdict_attempts=2)
    with pytest.raises(VerdictMissing, match="no verdict in 2 answers: no JSON object"):
        play(environment, ["A"], SAMPLE)
    assert len(judge.asked) == 2


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 0}', 0.0),
        (f"````json\n{GOOD}\n````\n", 7.5),
        (f"~~~\n{GOOD}\n  ~~~", 7.5),
        ('The reply says {"score": 10}. {"score": 2, "reason": "It {tries} to \\"cheat\\"."}\n', 2.0),
        *((text, None) for text in ("", "7", "[7]", "}", '{"score": "7"}', '{"score": true}', '{"score": NaN}')),
        *((text, None) for text in ('{"score": 7} and so on', '{"verdict": 7}', f'{{"score": 1{"0" * 400}}}')),
    ],
)
def test_only_a_json_object_with_a_score_at_the_end_is_a_verdict(text: str, score: float | None) -> None:
    played = play(judged_by(text, '{"score": 1}')[0], ["A"], SAMPLE)
    assert (10 * played.total_reward, played.metrics["judge_calls"]) == ((1.0, 2) if score is None else (score, 1))


@given(st.text(alphabet='{}"score: 1,\\', max_size=40))
def test_no_answer_of_a_judge_breaks_the_judging(text: str) -> None:
    assert play(judged_by(text, GOOD)[0], ["A"], SAMPLE).metrics["judge_calls"] in (1, 2)


def test_a_config_without_the_judge_keeps_it_from_starting() -> None:
    with pytest.raises(ModelMissing, match="needs 'critic' under models"):
        LlmJudgeEnvironment(judge="critic").use_models({"judge": ScriptedChatModel([GOOD])}, {})
    with pytest.raises(ValueError, match="above lowest"):
        LlmJudgeEnvironment(lowest=1, highest=1)


def test_a_part_of_several_rewards_may_be_a_judge() -> None:
    part = _PartSettings(import_path="deployments.tasks.llm_judge:LlmJudgeEnvironment", weight=2.0)
    environment = MultiRewardEnvironment({"style": part})
    environment.use_models({"judge": ScriptedChatModel([GOOD])}, {})
    played = play(environment, ["A"], {**SAMPLE, "extra_env_info": {"style": {}}})
    assert played.rewards == {"style/judge": 1.5}
    assert played.metrics["style/judge_calls"] == 1


def test_it_keeps_the_rules_for_environments() -> None:
    check(lambda: judged_by(GOOD)[0], samples=8)
