"""Rollouts whose prompts the chat template renders anew: the logs that they leave, and the tokens in each of them."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.chat.chat_tokenizer import TransformersChatTokenizer
from deployments.protocols.chat import ChatOptions, ParsedResponse
from deployments.protocols.generation import Generation, GenerationRequest, SamplingOptions
from deployments.protocols.images import image_spans
from deployments.rollout_records.book import RolloutRecordsSettings
from deployments.rollout_records.store import RolloutRecordStore
from rollout_client.contract.messages import PromptMessage
from rollout_client.contract.rollouts import SampleInput, SampleResult
from rollout_client.results import branches_of, logs_of, resumed, token_row
from rollout_env import ChatMessage, StepOutcome
from service.rollout_records.recorder import RolloutRecorder
from service.rollouts.episode import Episode
from service.rollouts.episode_records import EpisodeLimits, EpisodeStart, Prompt
from tests import virtual_time
from tests.deployments.chat.vendors import Family, Vendor, call, result, vendor
from tests.service.jobs import scripted_ingresses
from tests.service.jobs.scripted_ingresses import ScriptedIngresses, request_of
from tests.service.replay.test_replayer import SEEDED, replayed
from tests.service.replay.test_replayer import played as seeded
from tests.service.rollout_requests.test_arrow_encoder import as_arrow
from tests.service.rollout_requests.test_forks import LIMITS, SAMPLE, WalkingEnvironment, played
from tests.service.rollouts.playing import generation_due
from tests.service.rollouts.playing import play as scripted
from tests.service.rollouts.test_images import NAMES, TOKENS
from tests.service.scripted import (
    EpisodeRecipe,
    ScriptedEnvironment,
    ScriptedGenerator,
    ids_of,
    outcome,
    text_of,
    without_names,
)
from tests.service.scripted_http import DESCRIPTION, ScriptedHttp
from tests.vision_model import vision_tokenizer

QUESTION = PromptMessage(role="user", content="Question")
BOUNDS = EpisodeLimits(max_seq_len=20_000, max_new_tokens=None, max_rollout_turns=20)
Turn = tuple[str, ParsedResponse | None, list[ChatMessage]]


def play(
    one: Vendor,
    turns: Sequence[Turn],
    renders: bool = True,
    prompt: PromptMessage = QUESTION,
    bounds: EpisodeLimits = BOUNDS,
) -> tuple[SampleResult, list[list[int]]]:
    """The rollout, and the prompt of each of its turns."""
    sample = SampleInput(task_name="task", messages=[prompt])
    chat = ChatOptions(images={} if prompt is QUESTION else TOKENS)
    log = one.tokens.prompt([prompt], chat, bounds.max_seq_len)
    start = EpisodeStart(Prompt.of(log, None, sample), {}, (), SamplingOptions(), chat, renders=renders)
    episode = Episode(EpisodeRecipe().identity(), start, bounds, one.tokens)
    prompts = []
    for place, (text, parsed, observed) in enumerate(turns):
        prompts.append([*generation_due(episode).prompt_token_ids])
        ids = one.ids_of(text + one.family.end_after(parsed.tool_calls if parsed else ()))
        episode.add_generation(Generation(ids, [-1.0 - place] * len(ids), "stop"))
        episode.add_parsed(parsed or ParsedResponse())
        episode.add_outcome(StepOutcome(observed, 1.0, terminated=place == len(turns) - 1))
    return episode.result(), prompts


def said(text: str) -> list[ChatMessage]:
    return [{"role": "user", "content": text}]


words = st.text(alphabet="ab é漢{<", min_size=1, max_size=8).map(lambda text: f"x{text}x")
answers = words | st.builds("<think>\n{}\n</think>\n\n{}".format, words, words)
turns = st.lists(st.tuples(answers, st.none(), words.map(said)), min_size=1, max_size=6)
STRIPPING = ("qwen3", "glm4moe", "deepseekv3", "nemotron_3_nano", "qwen3_5_think", "deepseek_r1_distill")
KEEPING = ("qwen2_5", "llama3", "phi3", "qwen3_instruct_2507")


@pytest.mark.parametrize("name", [*STRIPPING, *KEEPING])
@given(turns=turns)
def test_each_prompt_is_rendered_and_each_token_is_trained_once(name: str, turns: list[Turn]) -> None:
    one = vendor(name)
    rollout, prompts = play(one, turns)
    chat: list[Any] = said("Question")
    for prompt, (text, _, observed) in zip(prompts, turns, strict=True):
        assert prompt == one.ids_of(one.rendered(chat))
        chat += [{"role": "assistant", "content": text}, *observed]
    trained = Counter[tuple[float, int]]()
    for row in map(token_row, branches_of(rollout)):
        tokens = zip(row.generation_logprobs, row.token_ids, row.loss_mask, strict=True)
        trained.update((logprob, token) for logprob, token, mask in tokens if mask)
    sampled = enumerate(one.ids_of(text + one.family.end) for text, _, _ in turns)
    assert trained == Counter((-1.0 - turn, token) for turn, ids in sampled for token in ids)
    if name in KEEPING:
        assert rollout == play(one, turns, renders=False)[0]


def test_a_rendering_beyond_the_longest_sequence_leaves_the_log_and_cuts_what_was_seen() -> None:
    one, thought = vendor("qwen3"), "<think>\nT\n</think>\n\nA"
    whole, _ = play(one, [(thought, None, said("And?")), ("B", None, [])])
    log = whole.branches[0].message_log
    bounds = replace(BOUNDS, max_seq_len=sum(len(message.token_ids) for message in log) + 4, max_rollout_turns=1)
    assert len(whole.branches) == 1
    cut, _ = play(one, [(thought, None, said("And?" * 99))], bounds=replace(bounds, max_rollout_turns=2))
    assert (cut.branches, len(cut.message_log[-1].token_ids), cut.truncated) == ([], 4, True)


def test_thoughts_stay_through_calls_and_go_at_the_next_question() -> None:
    one, made = vendor("qwen3"), [call(0, "add", '{"a": 41}')]
    calling = '<think>\nT0\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 41}}\n</tool_call>'
    first = calling, ParsedResponse(made, "\nT0\n", "\n\n"), [result(0, "42")]
    then = "<think>\nT1\n</think>\n\nIt is 42.", ParsedResponse([], "\nT1\n", "\n\nIt is 42."), said("And?")
    rollout, prompts = play(one, [first, then, ("That is all.", None, said("Bye"))])
    assert [len(branch.message_log) for branch in as_arrow([rollout]).samples[0].branches] == [4]
    called = {"role": "assistant", "content": "", "tool_calls": [call(0, "add", {"a": 41})]}
    answered = {"role": "assistant", "content": "It is 42."}
    chat = [*said("Question"), called, result(0, "42"), answered, *said("And?")]
    assert one.text_of(prompts[-1]) == one.rendered(chat)
    assert rollout.message_log[1].content == calling


@dataclass
class ThinkingGenerator(ScriptedGenerator):
    """Answers greedily by the prompt alone, one time of three without a thought."""

    script: Sequence[str | Exception] = ()

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        number = crc32(repr([*request.prompt_token_ids]).encode())
        await asyncio.sleep(number % 4)
        letters = "".join(chr(97 + (number >> place) % 26) for place in range(6))
        text = letters[:2] if number % 3 == 0 else f"<think>\n{letters[:3]}\n</think>\n\n{letters[3:]}"
        return Generation(ids_of(text), [-(number % 64) / 64] * len(text), "stop")


def thinking_http() -> ScriptedHttp:
    recorder = RolloutRecorder(cast(Any, RolloutRecordStore(RolloutRecordsSettings())))
    with patch("tests.service.scripted_http.tokenizer", vendor("qwen3").tokens):
        http = ScriptedHttp(LIMITS, generator=ThinkingGenerator(), recorder=recorder, description=WIDE)
    http.environments["math"] = WalkingEnvironment()
    return http


WIDE = replace(DESCRIPTION, max_model_len=2000, vocab_size=2000)
OPTIONS: dict[str, Any] = {"history": "template", "max_seq_len": 2000, "max_rollout_turns": 8}


def plain(rollout: SampleResult) -> tuple[Any, ...]:
    shared = [branch.shared_messages for branch in rollout.branches]
    return shared, [[message.model_dump(exclude={"reward"}) for message in log] for log in logs_of(rollout)]


@given(content=words)
@settings(max_examples=10)
@virtual_time.synchronous
async def test_a_fork_and_a_resumed_rollout_keep_the_branches(content: str) -> None:
    http = thinking_http()
    sample = {**SAMPLE, "messages": [{"role": "user", "content": content}]}
    [parent] = await played(http, [sample], **OPTIONS)
    count = parent.metrics.turn_count
    points = [{"rollout": parent.rollout_id, "turn": turn} for turn in range(count)]
    for fork in await played(http, [{"task_name": "math", "fork": point} for point in points], **OPTIONS):
        assert plain(fork) == plain(parent)
    for turns in range(1, count):
        [begun] = await played(http, [sample], **OPTIONS | {"max_rollout_turns": turns})
        [whole] = await played(http, [resumed(begun).model_dump(mode="json", exclude_unset=True)], **OPTIONS)
        assert (plain(whole), whole.status) == (plain(parent), parent.status)


@pytest.mark.parametrize("kills_after_s", [[3], [2, 6, 4], [9, 9]])
@virtual_time.synchronous
async def test_a_job_that_is_taken_over_keeps_the_branches(kills_after_s: list[float]) -> None:
    answers = []
    for kills in ([], kills_after_s):
        with patch.multiple(scripted_ingresses, tokenizer=vendor("qwen3").tokens, DESCRIPTION=WIDE):
            cluster = ScriptedIngresses(generator=ThinkingGenerator())
            job_id = await cluster.submit(request_of(groups=3, history="template", max_rollout_turns=6))
            for after_s in kills:
                await asyncio.sleep(after_s)
                cluster.kill(0)
                cluster.kill(1)
            await cluster.ended(job_id)
        answers.append({one["position"]: without_names([one["sample"]]) for one in await cluster.samples(job_id)})
    assert answers[0] == answers[1]


@patch("tests.service.replay.seeded_engine.LETTERS", "a().")
def test_each_branch_can_be_generated_again() -> None:
    rollout = seeded(SEEDED, [None, 2, None, 1], [1, 1, 2], turns=9, renders=True, max_new_tokens=9)
    assert len(rollout.branches) > 1
    for number, one in enumerate([*rollout.branches, cast(Any, rollout)]):
        own = {"message_log": one.message_log, "branches": rollout.branches[:number], "replay": one.replay}
        assert replayed(rollout.model_copy(update=own)).verdict == "equal"


def test_a_rendering_makes_room_and_leaves_no_log_that_has_ended() -> None:
    for turns, room in ((2, 30), (9, 12), (3, 12)):
        recipe = EpisodeRecipe(max_rollout_turns=turns, max_seq_len=room, renders=True)
        rollout = scripted(recipe, ScriptedGenerator(["(bcd)e"]), ScriptedEnvironment([outcome("O")]))
        count = rollout.metrics.turn_count
        assert rollout.metrics.turn_input_tokens == [*range(1, 1 + 4 * count, 4)]
        assert rollout.message_log[-2 + (rollout.message_log[-1].role == "assistant")].generation_logprobs
        assert len(rollout.branches) == count - 1


def test_a_rollout_that_is_played_anew_forgets_the_logs_that_it_left() -> None:
    episode = EpisodeRecipe(renders=True, retries=1).make()
    episode.add_generation(Generation(ids_of("(a)b"), [-1.0] * 4, "stop"))
    episode.add_outcome(outcome("O"))
    assert [text_of(generation_due(episode).prompt_token_ids), len(episode.result().branches)] == ["Qb<O>", 1]
    assert episode.take_restart()
    assert [text_of(generation_due(episode).prompt_token_ids), episode.result().branches] == ["Q", []]


def test_images_keep_their_places() -> None:
    hf = vision_tokenizer()
    hf.chat_template = hf.chat_template.replace("['content'] -}}", "['content'].split(')')[-1] -}}")
    like: Any = SimpleNamespace(ids_of=lambda text: hf(text)["input_ids"], family=Family("<|end|>"))
    like.tokens = TransformersChatTokenizer(hf)
    parts = [{"type": "text", "text": "Look"}, {"type": "image", "image": NAMES[0]}, {"type": "text", "text": "!"}]
    shown: list[ChatMessage] = [{"role": "user", "content": "See", "images": [*NAMES[1:3]]}]
    turns = [("(a)b", None, shown), ("c", None, said("d")), ("(e)f", None, said("g")), ("h", None, said("i"))]
    rollout, prompts = play(like, turns, prompt=PromptMessage.model_validate({"role": "user", "content": parts}))
    for log, count in zip(logs_of(rollout), (1, 3, 3), strict=True):
        ids, images = [token for message in log for token in message.token_ids], image_spans(log)
        assert [image.name for image in images] == NAMES[:count]
        assert all(ids[image.start : image.end] == [*TOKENS[image.name].token_ids] for image in images)
    assert hf.decode(prompts[-1]).startswith("<|user|>\nLook<fake_token_around_image>")


@pytest.mark.parametrize("fields", [{"include": ["routed_experts"]}, {"observation_format": "raw"}])
def test_what_no_template_can_render_is_refused(fields: dict[str, Any]) -> None:
    answer = thinking_http().post({"samples": [SAMPLE], "history": "template", **fields}).json()
    assert "no template renders raw observations" in str(answer["errors"])
