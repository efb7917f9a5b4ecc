"""What is read out of responses: who sees it, and that it changes neither text nor tokens."""

import asyncio
from dataclasses import dataclass, field

from deployments.protocols.chat import ParsedResponse, ResponseParser, ResponseToParse
from rollout_client.contract.messages import GivenMessage
from rollout_client.contract.rollouts import SampleResult
from service.rollouts.loop import RolloutContext, _play_sample
from service.rollouts.pacing import Schedule
from tests import virtual_time
from tests.service.rollouts.playing import collect
from tests.service.scripted import (
    EpisodeRecipe,
    RecordingChatTokenizer,
    ScriptedEnvironment,
    ScriptedGenerator,
    ids_of,
    outcome,
    text_of,
)

TEXT = "<think>Hm.</think>So:<call>"
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": "{}"}}
FOUND = ParsedResponse([CALL], "Hm.", "So:", None)
BROKEN = ParsedResponse(parse_error="JSONDecodeError: no")
NOTHING = ParsedResponse()


@dataclass
class ScriptedParser(ResponseParser):
    """Finds the next entry of its script in each response."""

    script: list[ParsedResponse]
    delay_s: float = 0.0
    asked: list[ResponseToParse] = field(default_factory=list)

    async def parse(self, response: ResponseToParse) -> ParsedResponse:
        found = self.script[len(self.asked) % len(self.script)]
        self.asked.append(response)
        await asyncio.sleep(self.delay_s)
        return found


def context_of(parser: ResponseParser | None, environment: ScriptedEnvironment) -> RolloutContext:
    return RolloutContext(ScriptedGenerator([TEXT, "B"]), {"task": environment}, Schedule(), response_parser=parser)


def played(
    parser: ScriptedParser | None, environment: ScriptedEnvironment, recipe: EpisodeRecipe | None = None
) -> SampleResult:
    return virtual_time.run(_play_sample((recipe or EpisodeRecipe()).make(), context_of(parser, environment))).result()


def two_turns() -> ScriptedEnvironment:
    return ScriptedEnvironment([outcome("O"), outcome("P", terminated=True)])


def test_what_is_read_out_of_a_response_is_beside_its_text() -> None:
    environment = two_turns()
    result = played(ScriptedParser([FOUND, NOTHING]), environment)
    found = {"tool_calls": [CALL], "reasoning_content": "Hm.", "parsed_content": "So:"}
    seen = {"role": "assistant", "content": TEXT, **found}
    judged = {"finish_reason": "stop", "token_count": 27}
    assert environment.requests[0].message_log[-1] == {**seen, **judged}
    assert environment.requests[1].message_log[1] == seen
    assert environment.requests[1].message_log[-1] == {"role": "assistant", "content": "B", **judged, "token_count": 1}
    response = result.message_log[1]
    assert {name: getattr(response, name) for name in seen} == seen
    assert text_of(response.token_ids) == response.content
    assert not result.message_log[3].model_fields_set & found.keys()
    assert result.metrics.parse_errors == 0


def test_what_cannot_be_read_is_counted_and_stepped() -> None:
    environment = two_turns()
    result = played(ScriptedParser([BROKEN, FOUND]), environment)
    assert environment.requests[0].message_log[-1].get("parse_error") == "JSONDecodeError: no"
    assert (result.status, result.metrics.parse_errors) == ("completed", 1)
    assert result.message_log[1].parse_error == "JSONDecodeError: no"


def test_the_parser_is_told_the_turn_and_what_came_before_the_response() -> None:
    parser = ScriptedParser([NOTHING])
    played(parser, two_turns(), EpisodeRecipe(prompt="Q"))
    told = [(text_of(asked.prompt_token_ids), text_of(asked.token_ids), asked.turn) for asked in parser.asked]
    assert told == [("Q", TEXT, 0), (f"Q{TEXT}O", "B", 1)]


def test_an_observation_is_tokenized_behind_the_calls_of_the_response() -> None:
    tokenizer = RecordingChatTokenizer()
    played(ScriptedParser([FOUND, NOTHING]), two_turns(), EpisodeRecipe(tokenizer=tokenizer))
    assert [asked.calls for asked in tokenizer.asked] == [[CALL], ()]


def test_a_log_that_was_parsed_before_it_was_posted_is_not_parsed_again() -> None:
    result = played(ScriptedParser([FOUND]), ScriptedEnvironment([outcome("O", terminated=True)]))
    posted = [GivenMessage.model_validate(message.model_dump(exclude_unset=True)) for message in result.message_log[:2]]
    assert (posted[1].tool_calls, posted[1].reasoning_content) == ([CALL], "Hm.")
    parser, environment = ScriptedParser([NOTHING]), ScriptedEnvironment([outcome("O", terminated=True)])
    played(parser, environment, EpisodeRecipe(message_log=lambda _: list(posted)))
    assert parser.asked == []
    assert environment.requests[0].message_log[-1]["tool_calls"] == [CALL]


def test_a_deadline_may_leave_a_response_unparsed() -> None:
    context = context_of(ScriptedParser([FOUND], delay_s=10.0), environment := two_turns())
    result = collect([EpisodeRecipe().make()], context, deadline_s=1.0)[0]
    assert (result.status, environment.requests) == ("deadline", [])
    assert list(result.message_log[1].token_ids) == ids_of(TEXT)
    assert result.message_log[1].tool_calls is None
