"""A session's calls in the replica that makes them: each one's plan, its prompt, and its record in the session store.

`_ShownChoices` joins what the caller has seen of a streamed answer to the message that it will send back. The store
hears twice a second which calls are in flight, and says which to abort; a store that starts again learns of them in
this way (its half: `deployments/sessions/session_table.py`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import orjson

from deployments.failures import GenerationRejected, RolloutFailure
from deployments.generation.engine_outputs import GeneratedChoice
from deployments.protocols.generation import GenerationRequest, packed_ids, packed_logprobs
from deployments.protocols.images import ImagesByName, ImageSpan, ImageTokens
from deployments.protocols.model_server import ServedRequest
from deployments.rpc.background_tasks import BackgroundTasks
from deployments.sessions.records import (
    ChatContext,
    ChatMessage,
    Conversation,
    EngineCall,
    GeneratedMessage,
    Plan,
    PreparedPrompt,
    SessionUnknown,
    TokenPrompt,
    new_images,
    prepared_prompt,
    prompt_of_tokens,
)
from rollout_client.contract.messages import SampledWith

if TYPE_CHECKING:
    from deployments.generation.serving.template_renderer import TemplateRenderer
    from deployments.sessions.store import SessionStore

DATA = "data: "
DONE = "[DONE]"
_UNPREPARED = "vLLM has made the prompt of this call by itself, so that nothing of it can be recorded; call without one"
_SHORT_BODY_BYTES = 4096
_FEW_MESSAGES = 32
"""Conversations within both bounds are rendered and tokenized in a millisecond or two, before a thread would begin."""
_FINISH_REASONS: dict[str | None, Literal["stop", "length"]] = {"stop": "stop", "length": "length"}
_Choices = Mapping[int, GeneratedChoice]
"""By their index."""
HEARD_EVERY_S = 0.5
_NO_IDS = packed_ids(())
logger = logging.getLogger("rollout_service.generation")


class _ShownChoices:
    """The messages of a chat's choices, joined from the events that were sent."""

    def __init__(self) -> None:
        self._content: dict[int, dict[str, str]] = {}
        self._calls: dict[int, dict[int, dict[str, Any]]] = {}

    def note(self, event: str) -> None:
        """Adds what one server-sent event holds."""
        data = event.strip().removeprefix(DATA)
        if not data or data == DONE:
            return
        for choice in orjson.loads(data).get("choices") or ():
            if "delta" not in choice:
                # A choice of token ids: no message was shown.
                continue
            delta, index = choice.get("delta") or {}, choice["index"]
            texts = self._content.setdefault(index, {"content": "", "reasoning": ""})
            for name in texts:
                texts[name] += delta.get(name) or ""
            for part in delta.get("tool_calls") or ():
                calls, new = self._calls.setdefault(index, {}), {"id": "", "function": {"name": "", "arguments": ""}}
                call, given = calls.setdefault(part["index"], new), part.get("function") or {}
                call["id"] = part.get("id") or call["id"]
                call["function"]["name"] = given.get("name") or call["function"]["name"]
                call["function"]["arguments"] += given.get("arguments") or ""

    @property
    def messages(self) -> dict[int, Mapping[str, Any]]:
        """By index of the choice."""
        return {
            index: shown_message({**texts, "tool_calls": [*self._calls.get(index, {}).values()]})
            for index, texts in self._content.items()
        }


def shown_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant message of an answer, with the fields by which it is known again."""
    calls = [
        {"id": call.get("id"), "type": "function", "function": dict(call["function"])}
        for call in message.get("tool_calls") or ()
    ]
    shown: dict[str, Any] = {"role": "assistant", "content": message.get("content") or None}
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        shown["reasoning"] = reasoning
    if calls:
        shown["tool_calls"] = calls
    return shown


class SessionCallClient:
    """The calls of sessions in one replica, over the session store."""

    def __init__(
        self,
        store: "SessionStore",
        renderer: "TemplateRenderer",
        interrupt: Callable[[Sequence[str]], Awaitable[None]],
        image_tokens: Callable[[Sequence[str]], Awaitable[Sequence[ImageTokens]]],
    ) -> None:
        """`interrupt` lets generations of these ids end with the tokens that they have.

        `image_tokens` gives the tokens of images; it raises as `EngineImages.tokens`.
        """
        self.renderer = renderer
        self._store = store
        self.interrupt = interrupt
        self.image_tokens = image_tokens
        self._in_flight: dict[str, str] = {}
        """The session of each call."""
        self._hearing: asyncio.Task[None] | None = None
        self.tasks = BackgroundTasks()

    async def begin(self, session_id: str, call_id: str, conversation: Conversation, context: ChatContext) -> Plan:
        """Raises what `SessionStore.plan` raises."""
        plan = await self._store.plan(session_id, call_id, conversation, context)
        self._in_flight[call_id] = session_id
        if self._hearing is None:
            self._hearing = asyncio.create_task(self._keep_heard())
        return plan

    async def add(self, session_id: str, call: EngineCall) -> None:
        """Records a call, and ends it.

        Raises:
            StoreLost: in the end.
            SessionUnknown: the session was dropped meanwhile, and its record with it.
        """
        # The store that gets the plan with the call has its ids.
        sent = replace(call, plan=replace(call.plan, token_ids=_NO_IDS, response_ids=_NO_IDS, images=()))
        try:
            await self._store.add(session_id, sent)
        finally:
            self._in_flight.pop(call.id, None)

    async def end(self, session_id: str, call_id: str) -> None:
        """Ends a call that generated nothing."""
        self._in_flight.pop(call_id, None)
        await self._store.end_call(session_id, call_id)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Records a call, which nobody need wait for. A failure of it is logged."""
        task = self.tasks.start(work)
        task.add_done_callback(self._log_failure)
        return task

    def _log_failure(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or isinstance(failure := task.exception(), SessionUnknown):
            # Whoever waits for the answer is told; nobody wants the record.
            return
        if failure is not None:
            known = isinstance(failure, RolloutFailure)
            logger.warning("A call of a session is not recorded: %s", failure, exc_info=None if known else failure)

    async def _keep_heard(self) -> None:
        try:
            while self._in_flight:
                await asyncio.sleep(HEARD_EVERY_S)
                try:
                    await self.interrupt(await self._store.heard(dict(self._in_flight)))
                except RolloutFailure as failure:
                    logger.info("The session store did not hear of the calls here: %s", failure)
        finally:
            self._hearing = None


class SessionCall:
    """One call of a session. It ends once: recorded, or without a record if it generated nothing."""

    def __init__(self, request: ServedRequest, session_id: str, calls: SessionCallClient) -> None:
        self._request = request
        self._session_id = session_id
        self._calls = calls
        self._context = ChatContext()
        self._has_begun = False
        self._plan: Plan | None = None
        self._prompt: PreparedPrompt | None = None
        self._recording: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self.answer_id = request.generation_id
        """The `id` of the answer, by which its messages are rewarded."""
        self.is_constrained = False
        """Whether it makes tokens more or less likely whatever the policy says (`recording_client.py`)."""
        self.sampled_with: SampledWith | None = None
        """The distribution that it samples from, if it is not the session's."""
        self.shown = _ShownChoices()
        """Choices as the caller of a stream has seen them so far."""

    async def prepare(self, messages: Sequence[ChatMessage], context: ChatContext) -> Sequence[int]:
        """The ids of the prompt: the engine's own for what it has generated, rendered ones for what is new.

        Raises:
            SessionFailure: the session may not begin the call.
            RolloutFailure: the template refuses the messages, or the model an image; or a store is gone.
        """
        self._context = context
        plan = await self._begin(messages)
        images = await images_by_name(new_images(plan, messages), self._calls.image_tokens)
        prepare = partial(prepared_prompt, plan, messages, context, self._calls.renderer, images)
        self._prompt = await self._prepared(prepare, is_short=len(messages) <= _FEW_MESSAGES)
        return self._prompt.token_ids

    async def prepare_tokens(self, token_ids: Sequence[int]) -> None:
        """Begins a call whose caller has tokenized its prompt. Raises as `prepare`."""
        plan = await self._begin(TokenPrompt(packed_ids(token_ids)))
        self._prompt = await self._prepared(partial(prompt_of_tokens, plan, token_ids, self._calls.renderer.decode))

    async def _begin(self, conversation: Conversation) -> Plan:
        self._has_begun = True
        call_id = self._request.generation_id
        self._plan = await self._calls.begin(self._session_id, call_id, conversation, self._context)
        return self._plan

    async def _prepared(self, prepare: Callable[[], PreparedPrompt], is_short: bool = True) -> PreparedPrompt:
        is_short = is_short and len(self._request.body) <= _SHORT_BODY_BYTES
        return prepare() if is_short else await asyncio.to_thread(prepare)

    @property
    def new_prompt_tokens(self) -> int | None:
        """Tokens of the prompt that the session does not have yet, once it was prepared."""
        if self._plan is None or self._prompt is None:
            return None
        return len(self._prompt.token_ids) - len(self._plan.token_ids)

    def continued(self, request: GenerationRequest) -> GenerationRequest:
        """The request to the engine with what it continues: the oldest version, and which experts are known."""
        if self._plan is None:
            return request
        experts_from = self._plan.experts_from if request.include.routed_experts else 0
        return replace(request, oldest_version=self._plan.oldest_version, experts_from=experts_from)

    @property
    def images(self) -> Sequence[ImageSpan]:
        """Those of the prompt, once it was prepared."""
        return () if self._prompt is None else self._prompt.images

    def refuse_unprepared(self) -> None:
        """Raises `GenerationRejected` if the prompt was put together past the session: nothing could be recorded."""
        if self._prompt is None:
            raise GenerationRejected(_UNPREPARED)

    async def record(self, shown: Mapping[int, ChatMessage], choices: _Choices) -> None:
        """Records the call. When this returns, the record has what the caller is about to see.

        Cancelling this, as a caller who leaves does, does not cancel the recording.

        Args:
            shown: the message of each choice as the caller sees it.
            choices: what was generated for each.

        Raises:
            RolloutFailure: the store is gone.
            SessionUnknown: the session was dropped meanwhile.
        """
        if self._recording is None and self._plan is not None and self._prompt is not None:
            engine_call = self._engine_call(self._plan, self._prompt, shown, choices)
            self._recording = self._calls.start(self._calls.add(self._session_id, engine_call))
        if self._recording is not None:
            await asyncio.shield(self._recording)

    def leave(self, engine_ended: asyncio.Event | None, choices: _Choices) -> None:
        """Nothing more of the answer is wanted. A call that was not recorded ends with what the engine has made.

        Args:
            engine_ended: `None` if the engine was not called.
            choices: what is generated for each until then.
        """
        if self._has_begun and self._recording is None and self._ending is None:
            self._ending = self._calls.start(self._record_rest(engine_ended, choices))

    async def _record_rest(self, engine_ended: asyncio.Event | None, choices: _Choices) -> None:
        if engine_ended is None:
            await self._calls.end(self._session_id, self._request.generation_id)
            return
        await self._calls.interrupt([self._request.generation_id])
        await engine_ended.wait()
        await self.record(self.shown.messages, choices)

    def _engine_call(
        self,
        plan: Plan,
        prompt: PreparedPrompt,
        shown: Mapping[int, ChatMessage],
        choices: _Choices,
    ) -> EngineCall:
        name = self.answer_id
        generated = [
            self._generated(f"{name}-{index}" if len(choices) > 1 else name, choice, shown.get(index))
            for index, choice in sorted(choices.items())
        ]
        call_id = self._request.generation_id
        return EngineCall(call_id, self._context, plan, prompt.rendered, prompt.generation_prompt, generated)

    def _generated(self, name: str, choice: GeneratedChoice, shown: ChatMessage | None) -> GeneratedMessage:
        text = self._calls.renderer.decode(choice.token_ids)
        return GeneratedMessage(
            id=name,
            message=shown or {"role": "assistant", "content": text},
            text=text,
            token_ids=packed_ids(choice.token_ids),
            logprobs=packed_logprobs(choice.logprobs),
            finish_reason=_FINISH_REASONS.get(choice.finish_reason),
            weight_versions=choice.weight_versions,
            is_constrained=self.is_constrained,
            sampled_with=self.sampled_with,
            columns=choice.columns,
        )


async def images_by_name(
    names: Sequence[str], image_tokens: Callable[[Sequence[str]], Awaitable[Sequence[ImageTokens]]]
) -> ImagesByName:
    return dict(zip(names, await image_tokens(names), strict=True)) if names else {}
