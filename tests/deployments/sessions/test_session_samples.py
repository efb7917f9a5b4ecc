"""The branches of a session as rollouts."""

from deployments.sessions.samples import samples_of
from rollout_client.contract.rollouts import SampleInput
from rollout_client.contract.sessions import SessionSample
from service.rollout_requests.result_encoding import json_of
from tests.deployments.sessions.harness import NEXT, QUESTION, SYSTEM, FakeEngine, Reply
from tests.deployments.sessions.renderer import small


def branching() -> FakeEngine:
    """One answer with two continuations, the second one cut."""
    engine = FakeEngine(small())
    first = engine.call([SYSTEM, QUESTION], Reply("See:", "add", '{"a": 1}'))
    result = {"role": "tool", "content": "3", "tool_call_id": "tool-call0-0", "name": "add"}
    engine.call([SYSTEM, QUESTION, first.message, result], Reply("3"))
    engine.call([SYSTEM, QUESTION, first.message, NEXT], Reply("6", is_cut=True))
    return engine


def test_a_branch_has_the_fields_of_a_rollout() -> None:
    engine = branching()
    sample = samples_of("s", engine.record)[0]
    made = engine.made["call0-0"]
    assert [message.role for message in sample.message_log] == ["system", "user", "assistant", "tool", "assistant"]
    assert [message.generation_logprobs is None for message in sample.message_log] == [True, True, False, True, False]
    response, result = sample.message_log[2:4]
    assert response.content == '<think>add</think>See:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert (response.token_ids, response.generation_logprobs) == (made.token_ids, made.logprobs)
    assert (response.reasoning_content, response.parsed_content) == ("add", "See:")
    assert (response.tool_calls, response.finish_reason) == (made.message["tool_calls"], "stop")
    spans = [(span.version, span.start, span.end) for span in response.weight_versions or ()]
    assert spans == [("0", 0, len(made.token_ids))]
    assert (result.content, result.name, result.tool_call_id) == ("3", "add", "tool-call0-0")
    shown = "\n<|im_start|>tool\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert small().hf.decode(result.token_ids) == shown
    assert SessionSample.model_validate_json(json_of(sample)).generation_ids == ["call0-0", "call1-0"]


def test_branches_share_their_beginning_and_the_later_one_says_so() -> None:
    first, second = samples_of("s", branching().record)
    assert (first.generation_ids, first.shared_messages) == (["call0-0", "call1-0"], [])
    assert (second.generation_ids, second.shared_messages) == (["call0-0", "call2-0"], [2])
    assert (first.status, first.truncated) == ("completed", False)
    assert (second.status, second.truncated) == ("truncated", True)


def test_a_reward_of_a_message_counts_in_each_branch_that_has_it() -> None:
    engine = branching()
    engine.record.reward({"reward": 5.0}, "call0-0")
    engine.record.reward({"reward": 1.0}, "call0-0")
    engine.record.reward({"reward": 0.5, "style": 2.0}, "call1-0")
    engine.record.reward({"style": -1.0})
    first, second = samples_of("s", engine.record)
    assert (first.rewards, first.total_reward) == ({"style": 1.0, "reward": 1.5}, 2.5)
    assert (second.rewards, second.total_reward) == ({"style": -1.0, "reward": 1.0}, 0.0)
    assert [message.reward for message in first.message_log] == [None, None, 1.0, None, 2.5]


def test_the_metrics_count_what_comes_after_the_prompt() -> None:
    engine = branching()
    metrics = samples_of("s", engine.record)[0].metrics
    prompt, first, second = len(engine.prompts["call0-0"]), *(len(one.token_ids) for one in engine.record.generated[:2])
    observed = len(engine.prompts["call1-0"]) - prompt - first
    assert (metrics.turn_count, metrics.turn_gen_tokens) == (2, [first, second])
    assert metrics.turn_input_tokens == [prompt, prompt + first + observed]
    assert (metrics.assistant_tokens, metrics.env_tokens) == (first + second, observed)
    assert metrics.total_tokens == first + second + observed
    assert [sample.metrics.clipped_turns for sample in samples_of("s", branching().record)] == [0, 1]


def test_further_fields_of_a_sample_come_back_but_those_of_a_result() -> None:
    taken = dict.fromkeys(SessionSample.model_fields.keys() - SampleInput.model_fields.keys(), "column")
    posted = {"id": "q", "idx": 7, "task_name": "math", "level": 3, "extra_env_info": {"a": 1}}
    made, plain = (
        samples_of("s", branching().record, SampleInput.model_validate(given), generation_index=2)
        for given in (posted | taken, posted)
    )
    assert made == plain
    for sample in made:
        assert (sample.id, sample.idx, sample.task_name, sample.generation_index) == ("q", 7, "math", 2)
        assert (sample.model_extra, sample.extra_env_info) == ({"level": 3}, {"a": 1})


def test_taking_samples_changes_nothing_in_the_record() -> None:
    record = branching().record
    before = samples_of("s", record)
    before[0].message_log[0].content = "changed"
    assert samples_of("s", record)[0].message_log[0].content == "Be brief."
    assert samples_of("s", record)[1] == before[1]
