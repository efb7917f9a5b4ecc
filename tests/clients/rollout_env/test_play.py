"""Playing an environment against scripted replies."""

import asyncio
from base64 import b64encode
from contextlib import nullcontext
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_env import (
    ChatMessage,
    OutcomeInvalid,
    SampleRejected,
    Session,
    StartOutcome,
    StepOutcome,
    TemporaryFailure,
    aplay,
    play,
)
from rollout_env.play import Turn, cut_at_stop_string
from tests.clients.rollout_env.counting_environment import Count, CountingEnvironment, counting_sample
from tests.patterns import whole

texts = st.text(alphabet="ab", max_size=8)


class Saying(CountingEnvironment):
    """Answers each step with the next of its outcomes."""

    def __init__(self, *outcomes: StepOutcome) -> None:
        self.outcomes = list(outcomes)
        self.logs: list[list[ChatMessage]] = []
        self.infos: list[Count] = []

    async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
        self.logs.append(message_log)
        self.infos.append(extra_env_info)
        await asyncio.sleep(0)
        return self.outcomes[len(self.logs) - 1]


def says(content: str = "", reward: Any = 0.0, terminated: bool = False, **fields: Any) -> StepOutcome:
    return StepOutcome({"role": "user", "content": content}, reward, terminated, **fields)


def test_the_sample_is_the_first_example_unless_it_is_chosen() -> None:
    environment = CountingEnvironment()
    assert play(environment, []).extra_env_info == {"until": 2}
    assert play(environment, [], sample=3).extra_env_info == {"until": 5}
    assert play(environment, [], sample=1, seed=10).extra_env_info == {"until": 13}
    assert play(environment, [], sample=counting_sample(7)).extra_env_info == {"until": 7}


def test_stop_strings_end_replies_until_others_come() -> None:
    outcomes = [says(), says(next_stop_strings=["!"]), says(next_stop_strings=[]), says()]
    played = play(Saying(*outcomes), ["a. b! c"] * 4, counting_sample(3, stop_strings=["."]))
    assert played.turns == [
        Turn("a.", (".",), outcomes[0]),
        Turn("a.", (".",), outcomes[1]),
        Turn("a. b!", ("!",), outcomes[2]),
        Turn("a. b! c", (), outcomes[3]),
    ]
    assert [message["content"] for message in played.message_log[1::2]] == ["a.", "a.", "a. b!", "a. b! c"]
    assert played.stop_strings == ()


def test_an_environment_sees_no_tokens_and_cannot_change_the_log() -> None:
    class Vandal(Saying):
        async def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
            outcome = await super().step([message.copy() for message in message_log], extra_env_info)
            message_log[0]["content"] = "Broken."
            message_log.clear()
            return outcome

    environment = Vandal(says("x"))
    given_log = [{"role": "user", "content": "Go.", "token_ids": [1, 2], "name": "Ada"}]
    played = play(environment, ["a"], {"message_log": given_log, "extra_env_info": {"until": 1}})
    assert environment.logs == [
        [{"role": "user", "content": "Go.", "name": "Ada"}, {"role": "assistant", "content": "a"}]
    ]
    assert [message["content"] for message in played.message_log] == ["Go.", "a", "x"]


def test_extra_env_info_is_validated_before_each_step() -> None:
    with pytest.raises(SampleRejected, match=r"extra_env_info\.until: Field required"):
        play(CountingEnvironment(), ["1"], {"messages": [{"role": "user", "content": "Count."}]})
    with pytest.raises(SampleRejected, match=r"extra_env_info\.until: Input should be a valid integer"):
        play(Saying(says(metadata={"until": None}), says()), ["1", "2"])


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ({}, "The sample has no prompt: give it messages, at least one."),
        ({"messages": []}, "The sample has no prompt: give it messages, at least one."),
        ({"messages": [{"role": "user"}]}, "The sample's prompt is not valid: messages.0.content: Field required."),
        (
            {"message_log": [{"role": "", "content": ""}]},
            "The sample's prompt is not valid: message_log.0.role: Input should be 'system', 'user', 'assistant', "
            "'tool' or 'environment'.",
        ),
    ],
)
def test_a_sample_without_a_valid_prompt_is_refused(sample: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=whole(problem)):
        play(CountingEnvironment(), ["1"], sample)


def test_wrong_arguments_are_refused_in_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"^replies must be a list of strings, one a turn, got one string: 'hello'\.$"):
        play(CountingEnvironment(), "hello")


def test_play_works_inside_a_running_event_loop_and_aplay_runs_in_it() -> None:
    async def both() -> tuple[object, object]:
        return play(CountingEnvironment(), ["1", "2"]), await aplay(CountingEnvironment(), ["1", "2"])

    in_a_thread, awaited = asyncio.run(both())
    assert in_a_thread == awaited == play(CountingEnvironment(), ["1", "2"])


@given(texts, st.lists(texts.filter(bool), max_size=3))
def test_a_reply_is_cut_where_its_first_stop_string_is_complete(reply: str, stop_strings: list[str]) -> None:
    prefixes = (reply[:length] for length in range(len(reply) + 1))
    expected = next((prefix for prefix in prefixes if prefix.endswith(tuple(stop_strings))), reply)
    assert cut_at_stop_string(reply, stop_strings) == (expected if stop_strings else reply)


def test_an_observation_may_be_several_messages() -> None:
    messages: list[ChatMessage] = [
        {"role": "tool", "content": "4", "tool_call_id": "a"},
        {"role": "tool", "content": "5", "tool_call_id": "b", "name": "add"},
    ]
    environment = Saying(StepOutcome(messages, 1.0, terminated=False), says("end", terminated=True))
    played = play(environment, ["call", "done"], counting_sample(3))
    assert played.message_log[2:4] == messages
    assert [message["role"] for message in environment.logs[1]] == ["user", "assistant", "tool", "tool", "assistant"]
    assert environment.logs[1][2:4] == messages
    assert played.outcomes[0].observations == messages
    assert played.outcomes[1].observations == [{"role": "user", "content": "end"}]


def test_a_reply_may_be_a_message_with_calls_and_reasoning() -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    reply: ChatMessage = {"role": "user", "content": "I add.x!", "tool_calls": [call], "reasoning_content": "Hm."}
    environment = Saying(says("end", terminated=True))
    played = play(environment, [reply], {**counting_sample(3), "stop_strings": ["x"]})
    seen = {"role": "assistant", "content": "I add.x", "tool_calls": [call], "reasoning_content": "Hm."}
    assert environment.logs[0][-1] == seen
    assert played.message_log[1] == seen
    assert played.turns[0].reply == "I add.x"


def test_a_prompt_without_content_or_with_parts_is_text() -> None:
    call = {"function": {"name": "add", "arguments": {"numbers": [1]}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add "}, {"type": "text", "text": "1."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    environment = Saying(says("end", terminated=True))
    play(environment, ["1"], {**counting_sample(3), "messages": messages})
    assert environment.logs[0][:2] == [
        {"role": "user", "content": "Add 1."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def test_images_reach_an_environment_by_their_names_as_in_the_service() -> None:
    name = f"sha256:{sha256(b'a picture').hexdigest()}"
    content = [
        {"type": "image", "image": f"data:image/png;base64,{b64encode(b'a picture').decode()}"},
        {"type": "text", "text": "Which?", "image": None},
        {"type": "image", "image": "sha256:0", "text": None},
    ]
    shows = StepOutcome({"role": "user", "content": "This?", "images": [b"a picture"]}, 0.0, terminated=False)
    environment = Saying(shows, says("end", terminated=True))
    played = play(environment, ["1", "2"], {**counting_sample(3), "messages": [{"role": "user", "content": content}]})
    assert environment.logs[1] == [
        {"role": "user", "content": "Which?", "images": [name, "sha256:0"]},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "This?", "images": [name]},
        {"role": "assistant", "content": "2"},
    ]
    assert played.outcomes[0] == shows
    assert played.message_log[2] == shows.observation, "who plays it can see the picture"
    log = [{"role": "user", "content": "", "mm_ranges": [{"media": name, "start": 0, "end": 1}]}]
    environment = Saying(says("end", terminated=True))
    play(environment, ["1"], {"message_log": log, "extra_env_info": {"until": 3}})
    assert environment.logs[0][0] == {"role": "user", "content": "", "images": [name]}


class Dealing(CountingEnvironment):
    """Deals a card of its sample's own before the first reply."""

    def start(self, message_log: list[ChatMessage], extra_env_info: Count) -> StartOutcome:
        said: ChatMessage = {"role": "user", "content": f"Card {extra_env_info.until}, after {len(message_log)}."}
        state = {"until": extra_env_info.until, "count": 1}
        return StartOutcome(said, metadata=state, next_stop_strings=["!"])


@pytest.mark.parametrize("messages", [{}, {"messages": None}])
def test_a_start_makes_the_first_observation_and_the_state(messages: dict[str, Any]) -> None:
    played = play(Dealing(), ["2! 3"], {"extra_env_info": {"until": 2}, **messages})
    assert [message["content"] for message in played.message_log] == ["Card 2, after 0.", "2!", "That was 2."]
    assert played.terminated
    assert play(Dealing(), [], counting_sample(2)).message_log[1]["content"] == "Card 2, after 1."


def test_a_log_of_a_rollout_is_not_started_again() -> None:
    log = [{"role": "user", "content": "Q"}]
    played = play(Dealing(), ["1"], {"message_log": log, "extra_env_info": {"until": 2}})
    assert played.message_log[0]["content"] == "Q"
    assert played.extra_env_info == {"until": 2, "count": 1}


def test_what_a_start_returns_is_validated() -> None:
    environment = Dealing()
    environment.start = lambda *_: says("x")  # type: ignore[assignment, method-assign]
    with pytest.raises(OutcomeInvalid, match=r"start must return a StartOutcome, got StepOutcome\.$"):
        play(environment, [], counting_sample(1))


class Shelf(Session):
    """Counts in memory, and says when it is closed."""

    def __init__(self, environment: "ShelfEnvironment") -> None:
        self.environment = environment
        self.count = 0

    def step(self, message_log: list[ChatMessage], extra_env_info: Count) -> StepOutcome:
        if message_log[-1]["content"] == "raise":
            raise TemporaryFailure("The shelf fell.")
        self.count += 1
        return says(str(self.count), terminated=self.count == extra_env_info.until)

    def close(self) -> None:
        self.environment.closed += 1


class ShelfEnvironment(CountingEnvironment):
    def __init__(self) -> None:
        self.closed = 0
        self.logs: list[list[ChatMessage]] = []

    def open_session(self, message_log: list[ChatMessage], extra_env_info: Count) -> Session:
        self.logs.append(message_log)
        return Shelf(self)


@pytest.mark.parametrize("replies", [["a", "b", "c"], ["a", "raise"]])
def test_a_rollout_is_one_session_which_is_closed_whatever_it_raises(replies: list[str]) -> None:
    environment = ShelfEnvironment()
    fails: Any = pytest.raises(TemporaryFailure, match=r"The shelf fell\.") if "raise" in replies else nullcontext()
    with fails:
        played = play(environment, replies, counting_sample(2))
        assert [message["content"] for message in played.message_log[2::2]] == ["1", "2"]
    assert environment.logs == [[{"role": "user", "content": "Count to 2."}]]
    assert environment.closed == 1
