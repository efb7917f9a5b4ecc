"""Example objects that several descriptions of the OpenAPI document share. Each route's own are beside the route."""

from rollout_client.contract.messages import Message, PromptMessage, WeightVersionSpan
from rollout_client.contract.origins import Fork
from rollout_client.contract.problems import FieldProblem, Problem
from rollout_client.contract.rollouts import SampleInput, SampleMetrics, SampleResult

CHECKSUM = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
REQUEST_ID = "train-7/step-12"
SAMPLE = SampleInput(
    task_name="math",
    messages=[PromptMessage(role="user", content="What is 2 + 2?")],
    extra_env_info={"ground_truth": "4"},
)
FORKED = SampleInput(task_name="math", fork=Fork(rollout="step-7-a1b2c3d4e5f60718-0-0", turn=1))
RESULT = SampleResult(
    idx=0,
    generation_index=0,
    task_name="math",
    message_log=[
        Message(role="user", content="What is 2 + 2?", token_ids=[5, 17, 8]),
        Message(
            role="assistant",
            content="\\boxed{4}",
            token_ids=[31, 9, 2],
            generation_logprobs=[-0.02, -0.11, -0.001],
            finish_reason="stop",
            weight_versions=[WeightVersionSpan(version="7", start=0, end=3)],
            reward=1.0,
        ),
        Message(role="environment", content="", token_ids=[]),
    ],
    total_reward=1.0,
    rewards={"correctness": 1.0},
    status="completed",
    terminated=True,
    truncated=False,
    max_turns_reached=False,
    extra_env_info={"ground_truth": "4"},
    answer="4",
    metrics=SampleMetrics(
        turn_count=1,
        total_tokens=3,
        assistant_tokens=3,
        env_tokens=0,
        terminated=True,
        truncated=False,
        max_turns_reached=False,
        total_reward=1.0,
        turn_gen_tokens=[3],
        turn_input_tokens=[3],
    ),
)
PROBLEM = Problem(
    type="urn:rollout:problem:invalid-request",
    title="The request is not valid; nothing was started",
    status=422,
    detail="samples[0].task_name: there is no task 'maths'; the known ones are math.",
    errors=[
        FieldProblem(
            field="samples[0].task_name",
            message="there is no task 'maths'; the known ones are math",
            value="maths",
        )
    ],
    request_id=REQUEST_ID,
)
