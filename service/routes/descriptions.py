"""What the OpenAPI document says of each route beside its signature, as arguments of FastAPI's route decorators."""

from typing import Any

from pydantic import JsonValue

from deployments.jobs.failures import (
    EventsAcknowledged,
    EventUnknown,
    JobsFull,
    JobsNotConfigured,
    JobUnknown,
    KeyReused,
    NoDataSet,
    RunSuspended,
)
from deployments.policy.failures import (
    ChunkDamaged,
    ChunkMisplaced,
    PolicyNotCurrent,
    PolicyUnknown,
    SourceRefused,
    TrainerNotTrusted,
    TransferNotConfigured,
    TransferRefused,
    UpdateUnderWay,
    UploadsFull,
    VersionRefused,
    VersionUnknown,
    VersionUntried,
    WeightsRefused,
)
from deployments.sessions.failures import (
    GenerationUnknown,
    JudgementFailed,
    SessionClosed,
    SessionLimitReached,
    SessionNotJudgeable,
    SessionsNotConfigured,
    SessionUnknown,
)
from rollout_client.arrow.schema import ARROW
from rollout_client.calls.ndjson import StreamLine
from rollout_client.contract import policy as policy_contract
from rollout_client.contract.info import Ready, ServiceInfo, TaskList, TaskSamples, Vocabulary
from rollout_client.contract.jobs import Acknowledgement, JobCursor, JobEvent, JobList, JobStatus
from rollout_client.contract.policy import (
    SAFETENSORS,
    CheckpointSource,
    PolicyLayout,
    PolicyState,
    PolicyUpdate,
    RollbackTarget,
    TransferInit,
    TransferUpdate,
    TransferWorld,
    UploadState,
)
from rollout_client.contract.rollouts import RolloutRequest, RolloutResponse
from rollout_client.contract.scores import ScoreRequest, ScoreResponse
from rollout_client.contract.sessions import (
    DriftReport,
    ModelServerAnswer,
    ModelServerCall,
    SessionInfo,
    SessionList,
    SessionRequest,
    SessionReward,
    SessionSamples,
)
from service.http import examples
from service.http.openapi import (
    BINARY,
    content,
    header_parameter,
    json_request,
    json_response,
    refusal,
    refusals,
    schema_of,
)
from service.http.request_body import JSON
from service.problems import NO_MODEL_SERVER, OVERLOADED, QUOTA_EXCEEDED
from service.rollout_requests.result_encoding import NDJSON

Description = dict[str, Any]


def model_call(summary: str, example: JsonValue) -> Description:
    """Of a route of OpenAI's or Anthropic's API."""
    answer = content(schema_of(ModelServerAnswer), examples.MODEL_SERVER_ERROR)
    events = {"text/event-stream": content({"type": "string"})}
    refused = refusals(reads_body=True)
    return {
        "summary": summary,
        "responses": {
            200: {
                "description": "As vLLM's own server answers",
                "content": {JSON: content(schema_of(ModelServerAnswer), examples.MODEL_SERVER_ANSWER), **events},
            },
            **refused,
            400: {**refused[400], "content": {**refused[400]["content"], JSON: answer}},
            404: {"description": "The model is not known", "content": {JSON: answer}},
            429: refusal([OVERLOADED.title, QUOTA_EXCEEDED.title]),
            501: refusal([NO_MODEL_SERVER.title]),
        },
        "openapi_extra": json_request(ModelServerCall, example),
    }


def recorded(call: Description) -> Description:
    """Of the same route below a session, which refuses calls too."""
    given: dict[int | str, Any] = call["responses"]
    own = refusals(SessionUnknown, SessionClosed, SessionsNotConfigured)
    # A model server's own 404 is no problem document.
    unknown = {**own[404], "content": {**own[404]["content"], **given.get(404, own[404])["content"]}}
    limited = refusal([OVERLOADED.title, QUOTA_EXCEEDED.title, SessionLimitReached.title])
    return {**call, "responses": {**given, **own, 404: unknown, 429: limited}}


DIGEST = "sha-256=:n4bQgYhMfWWaL+qgxVrQFaO/TxsrC4Is0V1sFbDwCgg=:"
IDEMPOTENCY_KEY = header_parameter(
    "Idempotency-Key",
    "Names the request among the caller's: sent again with the same body it attaches to the run, or gets its answer.",
    '"step-17"',
)
PREFER = header_parameter(
    "Prefer",
    "`respond-async`: answer 202 and go on as a job; `heartbeat=15`: a stream that is silent for so many seconds sends "
    "an empty line.",
    "heartbeat=15",
)
ROLLOUT: Description = {
    "summary": "Play samples",
    "responses": {
        200: {
            "description": "All rollouts in input order; as NDJSON one line per rollout, then one with the summary",
            "content": {
                JSON: content(schema_of(RolloutResponse), examples.ROLLOUT_RESPONSE),
                NDJSON: content(schema_of(StreamLine)),
                ARROW: content(BINARY),
            },
        },
        202: {**json_response(JobStatus, examples.JOB_STATUS), "description": "A job, as `Prefer: respond-async` asks"},
        429: refusal([OVERLOADED.title, QUOTA_EXCEEDED.title, JobsFull.title]),
        502: refusal(["A sample failed, and the request said on_error: fail"]),
        **refusals(PolicyNotCurrent, PolicyUnknown, KeyReused, EventsAcknowledged, JobsNotConfigured, reads_body=True),
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                JSON: content(schema_of(RolloutRequest), examples.ROLLOUT_REQUEST),
                ARROW: content(BINARY),
            },
        },
        "parameters": [
            header_parameter("Content-Encoding", "How the body is compressed: `gzip` or `zstd`.", "zstd"),
            IDEMPOTENCY_KEY,
            PREFER,
        ],
    },
}
SCORE: Description = {
    "summary": "Score given tokens",
    "responses": {
        200: json_response(ScoreResponse, examples.SCORE_RESPONSE),
        429: refusal([OVERLOADED.title, QUOTA_EXCEEDED.title]),
        **refusals(PolicyNotCurrent, PolicyUnknown, reads_body=True),
    },
    "openapi_extra": json_request(ScoreRequest, examples.SCORE_REQUEST),
}
SUBMIT_JOB: Description = {
    "summary": "Play samples as a job",
    "status_code": 202,
    "responses": {
        202: {**json_response(JobStatus, examples.JOB_STATUS), "description": "The job has begun; see `Location`"},
        429: refusal([OVERLOADED.title, QUOTA_EXCEEDED.title, JobsFull.title]),
        **refusals(PolicyNotCurrent, PolicyUnknown, KeyReused, JobsNotConfigured, reads_body=True),
    },
    "openapi_extra": {
        "requestBody": ROLLOUT["openapi_extra"]["requestBody"],
        "parameters": [IDEMPOTENCY_KEY, *ROLLOUT["openapi_extra"]["parameters"][:1]],
    },
}
JOBS: Description = {
    "summary": "List the jobs",
    "responses": {200: json_response(JobList, examples.JOBS), **refusals(JobsNotConfigured)},
}
JOB: Description = {
    "summary": "Get the state of a job",
    "responses": {200: json_response(JobStatus, examples.JOB_STATUS), **refusals(JobUnknown, JobsNotConfigured)},
}
JOB_EVENTS: Description = {
    "summary": "Get the events of a job",
    "responses": {
        200: {
            "description": "One event a line, or server-sent events",
            "content": {NDJSON: content(schema_of(JobEvent)), "text/event-stream": content({"type": "string"})},
        },
        **refusals(JobUnknown, RunSuspended, EventsAcknowledged, EventUnknown, JobsNotConfigured),
    },
    "openapi_extra": {
        "parameters": [
            header_parameter("Last-Event-ID", "In place of `after`, as clients of server-sent events send it.", "7"),
            PREFER,
        ],
    },
}
JOB_CURSOR: Description = {
    "summary": "Get the cursor of a job over a data set",
    "responses": {
        200: json_response(JobCursor, examples.JOB_CURSOR),
        **refusals(JobUnknown, EventUnknown, NoDataSet, JobsNotConfigured),
    },
}
ACKNOWLEDGE: Description = {
    "summary": "Acknowledge events of a job",
    "responses": {
        200: json_response(JobStatus, examples.JOB_STATUS),
        **refusals(JobUnknown, EventUnknown, JobsNotConfigured, reads_body=True),
    },
    "openapi_extra": json_request(Acknowledgement, examples.ACKNOWLEDGEMENT),
}
DELETE_JOB: Description = {
    "summary": "Delete a job",
    "status_code": 204,
    "responses": refusals(JobUnknown, JobsNotConfigured),
}
DELETE_RUN: Description = {
    "summary": "Delete the job of an Idempotency-Key",
    "status_code": 204,
    "responses": refusals(JobUnknown, JobsNotConfigured),
    "openapi_extra": {"parameters": [IDEMPOTENCY_KEY]},
}
TASKS: Description = {
    "summary": "List the tasks",
    "responses": {200: json_response(TaskList, examples.TASKS), **refusals()},
}
TASK_SAMPLES: Description = {
    "summary": "Get samples of a task",
    "responses": {
        200: json_response(TaskSamples, examples.TASK_SAMPLES),
        404: refusal(["The task is not known"]),
        **refusals(),
    },
}
METRICS: Description = {
    "summary": "Get the metrics of all replicas",
    "responses": {
        200: {"description": "In Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **refusals(),
    },
}
INFO: Description = {
    "summary": "Describe the service",
    "responses": {200: json_response(ServiceInfo, examples.INFO), **refusals()},
}
VOCABULARY: Description = {
    "summary": "List the tokens of the model",
    "responses": {200: json_response(Vocabulary, examples.VOCABULARY), **refusals()},
}
POLICY: Description = {
    "summary": "Get the state of the weights",
    "responses": {200: json_response(PolicyState, examples.POLICY_STATE), **refusals(PolicyNotCurrent)},
}
POLICY_LAYOUT: Description = {
    "summary": "List the tensors of the model",
    "responses": {200: json_response(PolicyLayout, examples.POLICY_LAYOUT), **refusals()},
}
UPLOAD_STATE: Description = {
    "summary": "Get the state of an upload",
    "responses": {200: json_response(UploadState, examples.UPLOAD_STATE), **refusals(VersionUnknown)},
}
PUSH_VERSION: Description = {
    "summary": "Push weights",
    "description": policy_contract.__doc__,
    "responses": {
        200: {
            "description": "Every replica serves the new weights",
            **json_response(PolicyUpdate, examples.POLICY_UPDATE),
        },
        202: {
            "description": "Chunks of the weights are missing",
            **json_response(UploadState, examples.UPLOAD_STATE),
            "model": UploadState,
        },
        **refusals(
            WeightsRefused,
            VersionUntried,
            SourceRefused,
            VersionRefused,
            VersionUnknown,
            ChunkMisplaced,
            ChunkDamaged,
            UpdateUnderWay,
            UploadsFull,
            reads_body=True,
        ),
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                SAFETENSORS: content(BINARY),
                JSON: content(schema_of(CheckpointSource), examples.CHECKPOINT_SOURCE),
            },
        },
        "parameters": [
            header_parameter(
                "Content-Range",
                "Which bytes of the upload the body holds: `bytes first-last/total`, with `*` for an unknown total. "
                "Without it the body is the whole upload.",
                "bytes 0-67108863/268435456",
            ),
            header_parameter("Content-Digest", "Sha-256 of the body (RFC 9530).", DIGEST),
            header_parameter(
                "Weights-Digest",
                "With the last chunk: names the content of the file, as `rollout_client.weights.checksum.file_digest` "
                "computes it. A repeated push is known by it.",
                examples.CHECKSUM,
            ),
            header_parameter("Content-Encoding", "`zstd` if the whole upload is one zstd stream.", "zstd"),
        ],
    },
}
DROP_POLICY: Description = {
    "summary": "Drop a named policy",
    "status_code": 204,
    "responses": refusals(PolicyUnknown),
}
ROLLBACK: Description = {
    "summary": "Go back to the weights of an older version",
    "responses": {
        200: json_response(PolicyUpdate, examples.POLICY_UPDATE),
        **refusals(VersionUnknown, VersionRefused, WeightsRefused, UpdateUnderWay, reads_body=True),
    },
    "openapi_extra": json_request(RollbackTarget, examples.ROLLBACK_TARGET),
}
INIT_TRANSFER: Description = {
    "summary": "Connect the replicas with the trainer",
    "responses": {
        200: json_response(TransferWorld, examples.TRANSFER_WORLD),
        **refusals(TransferNotConfigured, TrainerNotTrusted, TransferRefused, reads_body=True),
    },
    "openapi_extra": json_request(TransferInit, examples.TRANSFER_INIT),
}
START_TRANSFER: Description = {
    "summary": "Pause the replicas for new weights",
    "status_code": 204,
    "responses": refusals(TransferNotConfigured, TransferRefused, UpdateUnderWay),
}
UPDATE_TRANSFER: Description = {
    "summary": "Receive tensors from the trainer",
    "status_code": 204,
    "responses": refusals(TransferNotConfigured, TransferRefused, reads_body=True),
    "openapi_extra": json_request(TransferUpdate, examples.TRANSFER_UPDATE),
}
FINISH_TRANSFER: Description = {
    "summary": "Make the received tensors a version",
    "responses": {
        200: json_response(PolicyUpdate, examples.POLICY_UPDATE),
        **refusals(TransferNotConfigured, TransferRefused, VersionRefused),
    },
}
MODELS: Description = {
    "summary": "List the model",
    "responses": {
        200: json_response(ModelServerAnswer, examples.MODEL_SERVER_ANSWER),
        **refusals(),
        501: refusal([NO_MODEL_SERVER.title]),
    },
}
CHAT_COMPLETIONS = model_call("Complete a chat", examples.CHAT_REQUEST)
RESPONSES = model_call("Create a response", examples.RESPONSES_REQUEST)
MESSAGES = model_call("Create a message", examples.MESSAGES_REQUEST)
COUNT_TOKENS = model_call("Count the tokens of a prompt", examples.MESSAGES_REQUEST)
TOKENIZE = model_call("Tokenize", examples.TOKENIZE_REQUEST)
DETOKENIZE = model_call("Decode token ids", examples.DETOKENIZE_REQUEST)
OPEN_SESSION: Description = {
    "summary": "Open a session",
    "status_code": 201,
    "responses": {
        201: {**json_response(SessionInfo, examples.SESSION_OPENED), "description": "The session; see `base_url`"},
        429: refusal([SessionLimitReached.title]),
        **refusals(SessionsNotConfigured, PolicyNotCurrent, PolicyUnknown, reads_body=True),
    },
    "openapi_extra": json_request(SessionRequest, examples.SESSION_REQUEST),
}
SESSIONS: Description = {
    "summary": "List the sessions",
    "responses": {200: json_response(SessionList, examples.SESSIONS), **refusals(SessionsNotConfigured)},
}
SESSION: Description = {
    "summary": "Get the state of a session",
    "responses": {200: json_response(SessionInfo, examples.SESSION), **refusals(SessionUnknown, SessionsNotConfigured)},
}
SESSION_SAMPLES: Description = {
    "summary": "Get the branches of a session as rollouts",
    "responses": {
        200: {
            "description": "All branches; as NDJSON one line for each",
            "content": {
                JSON: content(schema_of(SessionSamples), examples.SESSION_SAMPLES),
                NDJSON: content({"type": "string"}),
            },
        },
        **refusals(SessionUnknown, SessionsNotConfigured),
    },
}
SESSION_DRIFT: Description = {
    "summary": "Get what a session's program sent otherwise",
    "responses": {
        200: json_response(DriftReport, examples.SESSION_DRIFT),
        **refusals(SessionUnknown, SessionsNotConfigured),
    },
}
REWARD_SESSION: Description = {
    "summary": "Reward a session",
    "responses": {
        200: json_response(SessionInfo, examples.SESSION),
        **refusals(
            SessionUnknown,
            GenerationUnknown,
            SessionNotJudgeable,
            JudgementFailed,
            SessionsNotConfigured,
            reads_body=True,
        ),
    },
    "openapi_extra": json_request(SessionReward, examples.SESSION_REWARD),
}
END_SESSION: Description = {
    "summary": "End a session",
    "responses": {200: json_response(SessionInfo, examples.SESSION), **refusals(SessionUnknown, SessionsNotConfigured)},
}
HEALTHZ: Description = {"summary": "Check that the process is alive", "responses": refusals()}
READYZ: Description = {
    "summary": "Check that rollouts can be served",
    "responses": {200: json_response(Ready, examples.READY), **refusals()},
}
