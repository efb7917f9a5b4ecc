"""Example bodies for the OpenAPI document, made of the contract's types, so that they are always valid."""

from datetime import UTC, datetime

from pydantic import BaseModel, JsonValue

from rollout_client.contract.info import (
    DegradedPart,
    EncodedText,
    ModelInfo,
    Ready,
    ServiceInfo,
    ServiceVersions,
    TaskInfo,
    TaskList,
    TaskSamples,
    TokenizerInfo,
    Vocabulary,
)
from rollout_client.contract.jobs import Acknowledgement, JobCursor, JobList, JobStatus
from rollout_client.contract.messages import Message, PromptMessage, WeightVersionSpan
from rollout_client.contract.policy import (
    CheckpointSource,
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    ReplicaPolicy,
    ReplicaUpdate,
    RollbackTarget,
    TensorLayout,
    TransferInit,
    TransferUpdate,
    TransferWorld,
    UploadState,
    VersionInfo,
)
from rollout_client.contract.problems import FieldProblem, Problem
from rollout_client.contract.rollouts import (
    PolicyVersions,
    RolloutRequest,
    RolloutResponse,
    SampleInput,
    SampleMetrics,
    SampleResult,
    Sampling,
)
from rollout_client.contract.sample_ranges import PlaceRange, SampleRange
from rollout_client.contract.scores import ScoreRequest, ScoreResponse, SequenceScore
from rollout_client.contract.sessions import SessionInfo
from rollout_client.version import CONTRACT_VERSION

CHECKSUM = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
REQUEST_ID = "train-7/step-12"
SAMPLE = SampleInput(
    task_name="math",
    messages=[PromptMessage(role="user", content="What is 2 + 2?")],
    extra_env_info={"ground_truth": "4"},
)
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


def example(model: BaseModel) -> JsonValue:
    """`model` as JSON, only with the fields that were set."""
    document: JsonValue = model.model_dump(mode="json", exclude_unset=True)
    return document


ROLLOUT_REQUEST = example(
    RolloutRequest(samples=[SAMPLE], num_generations=1, sampling=Sampling(temperature=1.0, max_new_tokens=64))
)
ROLLOUT_RESPONSE = example(
    RolloutResponse(
        request_id=REQUEST_ID,
        metrics={"total_turns": 1, "mean_total_reward": 1.0},
        policy=PolicyVersions(oldest="7", newest="7", current="7"),
        samples=[RESULT],
    )
)
PROBLEM = example(
    Problem(
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
)
TASKS = example(
    TaskList(
        tasks=[
            TaskInfo(
                task_name="math",
                description="Arithmetic with one number as the answer.",
                fields={"type": "object", "properties": {"ground_truth": {"type": "string"}}},
                example=SAMPLE,
            )
        ]
    )
)
TASK_SAMPLES = example(TaskSamples(samples=[SAMPLE], next_start=1))
INFO = example(
    ServiceInfo(
        model=ModelInfo(name="org/model", revision="4e20de362430cd3b72f3", vocab_size=151_936, max_model_len=32_768),
        tokenizer=TokenizerInfo(
            vocabulary_sha256=CHECKSUM,
            vocabulary_size=151_669,
            encodings=[EncodedText(text="1 + 1", token_ids=[16, 488, 220, 16])],
            chat_template_sha256=CHECKSUM,
            rendered_chat="<|im_start|>user\nQuestion<|im_end|>\n<|im_start|>assistant\n",
        ),
        limits={"max_seq_len": 32_768, "max_rollouts_per_request": 65_536},
        versions=ServiceVersions(
            service="0.1.0", contract=CONTRACT_VERSION, engine="vllm 0.32.0", ray="2.60.0", transformers="5.19.0"
        ),
        policy_version=7,
        tasks=["math"],
    )
)
VOCABULARY = example(Vocabulary(tokens=["!", '"', None]))
JOB_STATUS_MODEL = JobStatus(
    job_id="5f2b8c1e9d3a4c70b6e1f0a2d4c8e6b3",
    state="running",
    request_id=REQUEST_ID,
    created_at=1764000000.0,
    last_event=3,
    acknowledged=2,
    idempotency_key="step-17",
)
JOB_STATUS = example(JOB_STATUS_MODEL)
JOBS = example(JobList(jobs=[JOB_STATUS_MODEL]))
ACKNOWLEDGEMENT = example(Acknowledgement(last=2))
JOB_CURSOR = example(
    JobCursor(
        job_id=JOB_STATUS_MODEL.job_id,
        event=2,
        samples_from=[
            SampleRange(
                task_name="math",
                start=512,
                count=64,
                without=[PlaceRange(start=512, count=1), PlaceRange(start=515, count=1)],
            )
        ],
    )
)
POLICY_STATE = example(
    PolicyState(
        current=7,
        versions=[
            VersionInfo(
                version=7,
                kind="full",
                checksum=CHECKSUM,
                size_bytes=1_781_248,
                created_at=datetime(2026, 1, 1, tzinfo=UTC),
            )
        ],
        replicas=[ReplicaPolicy(replica_id="b3x9k2", version=7, checksum=CHECKSUM)],
        transfer_world_size=2,
    )
)
POLICY_LAYOUT = example(
    PolicyLayout(tensors={"model.norm.weight": TensorLayout(dtype="BF16", shape=[128])}),
)
POLICY_UPDATE = example(
    PolicyUpdate(
        version=8,
        checksum=CHECKSUM,
        replicas=[ReplicaUpdate(replica_id="b3x9k2", status="swapped", load_s=0.4, swap_s=0.02, pause_s=0.02)],
    )
)
UPLOAD_STATE = example(UploadState(version=8, received_bytes=67_108_864, total_bytes=268_435_456))
CHECKPOINT_SOURCE = example(CheckpointSource(checkpoint="/checkpoints/step-12"))
ROLLBACK_TARGET = example(RollbackTarget(to=5))
TRANSFER_INIT = example(
    TransferInit(init_info={"master_address": "10.0.0.4", "master_port": 29500, "rank_offset": 1, "world_size": 3})
)
TRANSFER_UPDATE = example(
    TransferUpdate(
        update_info={"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[128]], "packed": False}
    )
)
TRANSFER_WORLD = example(TransferWorld(world_size=3))
SCORE_REQUEST = example(ScoreRequest(sequences=[[5, 17, 8, 31, 9, 2]], start=3))
SCORE_RESPONSE = example(
    ScoreResponse(
        request_id=REQUEST_ID,
        policy=PolicyVersions(oldest="7", newest="7", current="7"),
        scores=[SequenceScore(logprobs=[-0.02, -0.11, -0.001], weight_version="7")],
    )
)
READY = example(
    Ready(
        status="ready",
        degraded=[
            DegradedPart(
                part="environment",
                task_name="code",
                reason="The answer of the environment 'code' took longer than 5 s.",
            )
        ],
    )
)
QUESTION: JsonValue = [{"role": "user", "content": "What is 2 + 2?"}]
CHAT_REQUEST: JsonValue = {"messages": QUESTION, "max_tokens": 64, "return_token_ids": True}
RESPONSES_REQUEST: JsonValue = {"input": "What is 2 + 2?", "max_output_tokens": 64}
MESSAGES_REQUEST: JsonValue = {"model": "any", "messages": QUESTION, "max_tokens": 64}
TOKENIZE_REQUEST: JsonValue = {"messages": QUESTION}
DETOKENIZE_REQUEST: JsonValue = {"tokens": [5, 6, 7]}
MODEL_SERVER_ANSWER: JsonValue = {"id": "chatcmpl-1f0c", "object": "chat.completion", "model": "models/tiny"}
MODEL_SERVER_ERROR: JsonValue = {"error": {"message": "Unknown.", "type": "BadRequestError", "code": 400}}
SESSION_ID = "5f0c1e9bb9a04c0e8a2f6d0f3b1c7a42"
SESSION_INFO = SessionInfo(
    id=SESSION_ID, base_url=f"http://127.0.0.1:8000/v1/sessions/{SESSION_ID}", status="open", calls=2, branches=1
)
SESSION: JsonValue = SESSION_INFO.model_dump(mode="json", exclude_unset=True)
SESSION_OPENED: JsonValue = {**SESSION_INFO.model_dump(mode="json", exclude_unset=True), "api_key": "session-4f1d"}
SESSIONS: JsonValue = {"sessions": [SESSION]}
SESSION_REQUEST: JsonValue = {"sampling": {"temperature": 1.0, "max_new_tokens": 256}, "deadline_s": 600}
SESSION_REWARD: JsonValue = {"reward": 1.0}
SESSION_SAMPLES: JsonValue = {"session_id": SESSION_ID, "status": "open", "samples": []}
SESSION_DRIFT: JsonValue = {"session_id": SESSION_ID, "calls": 2, "drift": [], "counts": {"generated_ids": 0}}
