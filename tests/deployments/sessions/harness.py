"""A fake engine with a session's record behind it, and the ways in which harnesses send messages back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

from deployments.protocols.generation import WeightSpan, packed_ids, packed_logprobs
from deployments.protocols.images import ImageTokens
from deployments.protocols.token_columns import EXPERTS, MASK, MASK_SIZES, packed_rows
from deployments.sessions.records import (
    ChatContext,
    ChatMessage,
    EngineCall,
    GeneratedMessage,
    Plan,
    PreparedPrompt,
    new_images,
    prepared_prompt,
)
from deployments.sessions.session_record import SessionRecord
from rollout_client.contract.messages import PackedNumbers
from tests.deployments.sessions.renderer import PLAIN, TokenizerRenderer

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "1 + 2?"}
NEXT = {"role": "user", "content": "And 3?"}


@dataclass(frozen=True)
class Reply:
    """What the fake engine generates."""

    text: str
    thought: str | None = None
    arguments: str | None = None
    """Of a call of the tool `add`, as JSON."""
    is_cut: bool = False
    """Whether it ends at the length limit, without the end of its turn."""
    is_spelled: bool = False
    """Whether its markers are spelled in several tokens, which no tokenizer would."""

    @property
    def raw(self) -> str:
        thought = "" if self.thought is None else f"<think>{self.thought}</think>"
        call = (
            ""
            if self.arguments is None
            else (f'<tool_call>\n{{"name": "add", "arguments": {self.arguments}}}\n</tool_call>')
        )
        return thought + self.text + call

    def shown(self, call_id: str, is_parsed: bool) -> dict[str, Any]:
        """The message that the server answers."""
        if not is_parsed:
            return {"role": "assistant", "content": self.raw}
        function = {"name": "add", "arguments": self.arguments}
        calls = [] if self.arguments is None else [{"id": call_id, "type": "function", "function": function}]
        return {
            "role": "assistant",
            "content": self.text or None,
            "reasoning_content": self.thought,
            "tool_calls": calls,
        }


@dataclass
class Prepared:
    """A call whose prompt is put together and whose reply is not there yet."""

    plan: Plan
    prompt: PreparedPrompt
    context: ChatContext


class RecordWithPrompts(SessionRecord):
    def generated_at(self, number: int | None) -> GeneratedMessage | None:
        """The generated message at the node of this number."""
        [node] = {node for leaf in self.branches() for node in leaf.path() if node.number == number}
        return node.generated

    def prompt_ids(self, generation_id: str) -> Sequence[int]:
        """The prompt that the engine had for a generated message."""
        nodes = (node for leaf in self.branches() for node in leaf.path())
        [node] = {node for node in nodes if node.generated and node.generated.id == generation_id}
        assert node.parent is not None
        return node.parent.prefix_ids()


def columns_after(prompt: Sequence[int], token_ids: Sequence[int], experts_from: int) -> dict[str, PackedNumbers]:
    """Those of generated ids: each number says at which place its token stands, and what stands up to there."""
    ids = [*prompt, *token_ids]
    places, sums = range(len(prompt), len(ids)), [*accumulate(ids)]
    masks = [[*range(place % 4)] for place in places]
    experts = ((sums[place] % 256, place % 256) for place in range(experts_from, len(ids) - 1))
    return {
        "entropy": packed_rows([float(sums[place - 1] % 2**20) for place in places], "float32"),
        MASK: packed_rows(chain.from_iterable(masks), "int32"),
        MASK_SIZES: packed_rows(map(len, masks), "uint16"),
        EXPERTS: packed_rows(chain.from_iterable(experts), "uint8", [2, 1]),
    }


@dataclass
class FakeEngine:
    """Calls the engine for one session, and remembers what it was asked and what it made."""

    renderer: TokenizerRenderer
    is_parsed: bool = True
    includes: bool = False
    """Whether what it generates has columns."""
    images: Mapping[str, ImageTokens] = field(default_factory=dict)
    """Those that messages may show."""
    record: RecordWithPrompts = field(default_factory=RecordWithPrompts)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    made: dict[str, GeneratedMessage] = field(default_factory=dict)
    calls: list[EngineCall] = field(default_factory=list)

    def prepare(self, messages: Sequence[ChatMessage], context: ChatContext = PLAIN) -> Prepared:
        plan = self.record.plan(messages, context)
        known = {name: self.images[name] for name in new_images(plan, messages)}
        return Prepared(plan, prepared_prompt(plan, messages, context, self.renderer, known), context)

    def finish(self, prepared: Prepared, *replies: Reply) -> list[GeneratedMessage]:
        """Generates a choice for each reply, and records the call."""
        name = f"call{len(self.made)}"
        made = [self._generate(f"{name}-{place}", reply) for place, reply in enumerate(replies)]
        if self.includes:
            given = prepared.prompt.token_ids, prepared.plan.experts_from
            made = [replace(one, columns=columns_after(given[0], one.token_ids, given[1])) for one in made]
        for one in made:
            self.made[one.id] = one
            self.prompts[one.id] = list(prepared.prompt.token_ids)
        parts = prepared.prompt.rendered, prepared.prompt.generation_prompt
        self.calls.append(EngineCall(name, prepared.context, prepared.plan, *parts, made))
        self.record.add(self.calls[-1])
        return made

    def call(self, messages: Sequence[ChatMessage], reply: Reply, context: ChatContext = PLAIN) -> GeneratedMessage:
        [made] = self.finish(self.prepare(messages, context), reply)
        return made

    def _generate(self, name: str, reply: Reply) -> GeneratedMessage:
        spelled = [token_id for letter in reply.raw for token_id in self.renderer.encode(letter)]
        ids = spelled if reply.is_spelled else self.renderer.encode(reply.raw)
        ids = ids if reply.is_cut else [*ids, self.renderer.end_of_turn]
        first = len(self.made)
        return GeneratedMessage(
            id=name,
            message=reply.shown(f"tool-{name}", self.is_parsed),
            text=self.renderer.decode(ids),
            token_ids=packed_ids(ids),
            logprobs=packed_logprobs(-(first + place) / 8 for place in range(len(ids))),
            finish_reason="length" if reply.is_cut else "stop",
            weight_versions=(WeightSpan(str(first), 0, len(ids)),),
        )
