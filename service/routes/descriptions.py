"""What the OpenAPI document says of each route beside its signature, as arguments of FastAPI's route decorators."""

from typing import Any

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
from rollout_client import policy_contract
from rollout_client.arrow.schema import ARROW
from rollout_client.contract import RolloutRequest, RolloutResponse
from rollout_client.info_contract import ServiceInfo, Vocabulary
from rollout_client.ndjson import StreamLine
from rollout_client.policy_contract import (
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
from rollout_client.score_contract import ScoreRequest, ScoreResponse
from rollout_client.task_contract import TaskList, TaskSamples
from service.requests.media_types import JSON
from service.responses.ndjson import NDJSON
from service.responses.problems import OVERLOADED
from service.routes import examples
from service.routes.openapi import (
    BINARY,
    content,
    header_parameter,
    json_request,
    json_response,
    refusal,
    refusals,
    schema_of,
)

Description = dict[str, Any]

DIGEST = "sha-256=:n4bQgYhMfWWaL+qgxVrQFaO/TxsrC4Is0V1sFbDwCgg=:"
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
        429: refusal([OVERLOADED.title]),
        502: refusal(["A sample failed, and the request said on_error: fail"]),
        **refusals(PolicyNotCurrent, PolicyUnknown, reads_body=True),
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
        ],
    },
}
SCORE: Description = {
    "summary": "Score given tokens",
    "responses": {
        200: json_response(ScoreResponse, examples.SCORE_RESPONSE),
        429: refusal([OVERLOADED.title]),
        **refusals(PolicyNotCurrent, PolicyUnknown, reads_body=True),
    },
    "openapi_extra": json_request(ScoreRequest, examples.SCORE_REQUEST),
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
HEALTHZ: Description = {"summary": "Check that the process is alive", "responses": refusals()}
READYZ: Description = {"summary": "Check that rollouts can be served", "responses": refusals()}
