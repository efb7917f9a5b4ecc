"""Results of agents with several conversations, in every form of an answer."""

from rollout_client.calls.arrow_bodies import read_response
from rollout_client.contract.rollouts import PolicyVersions, RolloutResponse, RolloutSummary
from rollout_client.contract.sessions import SessionSample
from service.rollout_requests.arrow_encoder import ArrowResponseEncoder
from service.rollout_requests.result_encoding import JsonResponseEncoder, ResponseEncoder
from service.rollouts.agent_episode import AgentRunOutcome
from tests.service.agents.agent_runs import TWO_CALLS, AgentRecipe, branch, generated, said
from tests.service.scripted import ids_of

SUMMARY = RolloutSummary(request_id="request", metrics={}, policy=PolicyVersions())


LEFT = branch(said("user", "Q"), generated("AB"), said("tool", "X"), generated("D"))


def body(encoder: ResponseEncoder, main: SessionSample = TWO_CALLS, left: SessionSample = LEFT) -> bytes:
    episode = AgentRecipe().make()
    episode.add_run(AgentRunOutcome([left, main], calls=3))
    episode.cut_off("cancelled")
    encoder.add(0, episode.result())
    return b"".join(bytes(part) for part in encoder.body(SUMMARY))


def test_json_and_arrow_have_the_same_branches() -> None:
    [by_json] = RolloutResponse.model_validate_json(body(JsonResponseEncoder())).samples
    [by_arrow] = read_response(body(ArrowResponseEncoder())).to_response().samples
    assert by_arrow.branches == by_json.branches
    [left] = by_json.branches
    assert [message.content for message in left.message_log] == ["Q", "AB", "X", "D"]
    assert left.shared_messages == [1]
    last = left.message_log[-1]
    assert (list(last.token_ids), last.generation_logprobs) == (ids_of("D"), [-0.5])
    assert last.weight_versions is not None
    assert [span.version for span in last.weight_versions] == ["3"]
