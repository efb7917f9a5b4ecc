"""The record of one session: a forest of messages with their token ids. No I/O.

Guarantees:
- The ids and log-probabilities of a generated message are those of the engine, in its order, and are held once.
- The prompt of a call is recorded as the engine got it: the ids on the way from a root to its generation prompt.
- Nothing that was recorded changes or moves, so that a plan stays right while other calls are added.
- A call that is added twice is recorded once; one that generated nothing leaves nothing.
- The same calls in the same order make the same record, so that a log of them can stand for it.

Finding what a conversation continues costs one look-up for each of its messages, whatever the record holds, unless
siblings say the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deployments.protocols.generation import packed_ids
from deployments.protocols.images import image_spans
from deployments.protocols.token_columns import EXPERTS, RoutedExperts
from deployments.sessions.message_comparison import (
    call_ids,
    changed_fields,
    context_key,
    has_other_reasoning,
    message_drift,
    new_messages_drift,
    rendered_key,
    response_key,
    response_keys,
)
from deployments.sessions.records import (
    NO_PLAN,
    ChatContext,
    ChatMessage,
    Conversation,
    EngineCall,
    GeneratedMessage,
    GenerationUnknown,
    Plan,
    TokenPrompt,
)
from rollout_client.contract.base import read_label
from rollout_client.contract.messages import MediaRange
from rollout_client.contract.sessions import CallDrift, MessageDrift

_BEGINS_RESPONSE = b"generation prompt"
"""The key of the ids between a prompt's last message and a response. No digest has this length."""
_NODE_BYTES = 1000
"""Approximate size of a node without its ids, log-probabilities and texts."""


@dataclass(slots=True, eq=False)
class Node:
    """A message, or the generation prompt between a message and the responses to it."""

    number: int
    parent: "Node | None"
    message: ChatMessage | None
    """`None`: a generation prompt, or a root."""
    token_ids: Sequence[int]
    generated: GeneratedMessage | None = None
    mm_ranges: Sequence[MediaRange] = ()
    """Which of the ids stand for images."""
    rendered_children: dict[bytes, list["Node"]] = field(default_factory=dict)
    """By `rendered_key`. Those of one key have different ids."""
    responses: dict[bytes, list["Node"]] = field(default_factory=dict)
    """By each of their `response_keys`."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    is_continued: bool = False
    """Whether a call continues from this generated message."""

    def path(self) -> list["Node"]:
        """From the root, which is left out, to this node."""
        path, node = [], self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def prefix_ids(self) -> Sequence[int]:
        """The ids from the root to the end of this node."""
        ids = packed_ids(())
        for node in self.path():
            # Packed ids are copied as a whole. One by one, 250,000 of them would keep the store's loop for 10 ms.
            ids.extend(packed_ids(node.token_ids))
        return ids

    def children(self) -> Iterator["Node"]:
        """All nodes after this one, each once."""
        for nodes in self.rendered_children.values():
            yield from nodes
        yield from {node.number: node for nodes in self.responses.values() for node in nodes}.values()

    def next_for(self, message: ChatMessage) -> Iterator["Node"]:
        """The nodes after this one that hold the message, those first that were generated."""
        if message.get("role") == "assistant":
            key = response_key(message)
            for begins in self.rendered_children.get(_BEGINS_RESPONSE, ()):
                for node in begins.responses.get(key, ()):
                    if node.generated is not None and not has_other_reasoning(message, node.generated):
                        yield node
        yield from self.rendered_children.get(rendered_key(message), ())


class SessionRecord:
    """The record of one session."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Node] = {}
        self._nodes: list[Node] = []
        self._generated: dict[str, Node] = {}
        """By the id of the generated message, in the order in which they were added."""
        self.calls: dict[str, CallDrift] = {}
        """The drift of each call by its id, in the order in which they were added."""
        self._drifted: set[tuple[int | str, ...]] = set()
        """Generated messages by number, with the fields in which they came back otherwise: each is reported once."""
        self.rewards: Mapping[str, float] = {}
        """Rewards of the session as a whole, by name."""
        self.total_tokens = 0
        """Each counted once."""
        self.generated_tokens = 0
        self.size_bytes = 0
        """Approximate size of the record in memory."""

    def would_add(self, call: EngineCall) -> bool:
        """Whether `add` changes something: the call is new, and has generated something."""
        return call.id not in self.calls and any(one.token_ids for one in call.generated)

    @property
    def generated(self) -> Sequence[GeneratedMessage]:
        """Every message that the engine has generated, in the order in which they were added."""
        return [node.generated for node in self._generated.values() if node.generated is not None]

    def plan(self, conversation: Conversation, context: ChatContext, policy: str | None = None) -> Plan:
        """Finds the last message of a conversation that continues what was generated. Changes nothing.

        A prompt of token ids continues the longest beginning of it that was generated, whatever its context.

        Args:
            policy: the named policy whose versions count; `None` for the one without a name.

        Raises:
            PromptRejected: the messages or tools are nested too deeply.
        """
        if isinstance(conversation, TokenPrompt):
            last = self._last_generated_in(packed_ids(conversation.token_ids))
            return self._plan_after(last, len(_spoken(last)), policy)
        messages = conversation
        steps = self._matching(messages, context)
        covered, after = self._last_generated(steps, messages)
        drift: list[MessageDrift] = []
        for place, node in enumerate(_spoken(after)):
            fields = [] if node.generated is None else changed_fields(messages[place], node.generated)
            if fields and (node.number, *fields) not in self._drifted:
                drift.append(message_drift(place, messages[place], "generated_ids", fields))
        if (known := len(steps) - 1) < len(messages):
            is_branch = any(node.rendered_children for node in steps[-1])
            drift.extend(new_messages_drift(messages, known, is_branch))
        return self._plan_after(after, covered, policy, drift)

    def _plan_after(
        self, after: Node | None, covered: int, policy: str | None, drift: Sequence[MessageDrift] = ()
    ) -> Plan:
        if after is None:
            return replace(NO_PLAN, drift=tuple(drift))
        return Plan(
            after=after.number,
            covered=covered,
            token_ids=after.prefix_ids(),
            response_ids=after.token_ids,
            images=image_spans(after.path()),
            oldest_version=_oldest_version(after, policy),
            experts_from=experts_up_to(after).rows,
            drift=tuple(drift),
        )

    def add(self, call: EngineCall) -> None:
        """Records a call. The plan that it was prompted by may be older than other calls of the session."""
        if not self.would_add(call):
            return
        generated = [one for one in call.generated if one.token_ids]
        node = self._root(call.context) if call.plan.after is None else self._nodes[call.plan.after]
        node.is_continued = True
        spoken = _spoken(node)
        for drift in call.plan.drift:
            if drift.action == "generated_ids":
                self._drifted.add((spoken[drift.message].number, *drift.fields))
        for rendered in call.rendered:
            key, message, ids = rendered_key(rendered.message), rendered.message, rendered.token_ids
            node = self._rendered_child(node, key, message, ids, rendered.mm_ranges)
        node = self._rendered_child(node, _BEGINS_RESPONSE, None, call.generation_prompt)
        for one in generated:
            self._add_response(node, one)
        self.calls[call.id] = CallDrift(generation_ids=[one.id for one in generated], messages=list(call.plan.drift))

    def reward(self, parts: Mapping[str, float], generation_id: str | None = None) -> None:
        """Sets the reward of a generated message, or of the whole session, by names of its parts.

        Raises:
            GenerationUnknown: there is no such message.
        """
        if generation_id is None:
            self.rewards = dict(parts)
        else:
            self._generated_node(generation_id).rewards = dict(parts)

    def reward_number(self, generation_id: str | None) -> int:
        """Names a reward among those of the session, in the same way for the same calls in the same order.

        Raises:
            GenerationUnknown: there is no such message.
        """
        return 0 if generation_id is None else self._generated_node(generation_id).number + 1

    def branches(self) -> list[Node]:
        """The last generated message of each conversation, in the order in which they were added."""
        return [node for node in self._generated.values() if not node.is_continued]

    def _generated_node(self, generation_id: str) -> Node:
        if (node := self._generated.get(generation_id)) is None:
            message = f"The session has generated no message {generation_id!r}."
            raise GenerationUnknown.of("generation_id", message, generation_id)
        return node

    def _last_generated_in(self, token_ids: Sequence[int]) -> Node | None:
        """The generated message with which the longest recorded beginning of the ids ends; of equal ones the newest."""
        best, waiting = (0, -1), [(root, 0) for root in self._roots.values()]
        last: Node | None = None
        while waiting:
            node, length = waiting.pop()
            if node.generated is not None and (length, node.number) > best:
                best, last = (length, node.number), node
            for child in node.children():
                end = length + len(child.token_ids)
                if token_ids[length:end] == packed_ids(child.token_ids):
                    waiting.append((child, end))
        return last

    def _matching(self, messages: Sequence[ChatMessage], context: ChatContext) -> list[list[Node]]:
        """For 0, 1, 2, ... messages the nodes that hold the last of them, up to the last place where there are any.

        A conversation that was said twice has several.
        """
        root = self._roots.get(context_key(context))
        steps = [[] if root is None else [root]]
        for message in messages:
            found = [node for before in steps[-1] for node in before.next_for(message)]
            if not found:
                break
            steps.append(found)
        return steps

    def _last_generated(
        self, steps: Sequence[Sequence[Node]], messages: Sequence[ChatMessage]
    ) -> tuple[int, Node | None]:
        """How many messages the last generated one ends, and its node. One message at least is left to render."""
        for covered in range(min(len(steps), len(messages)) - 1, 0, -1):
            said = [node for node in steps[covered] if node.generated is not None]
            if said:
                return covered, max(said, key=lambda node: self._likeness(node, messages[covered - 1]))
        return 0, None

    def _likeness(self, node: Node, message: ChatMessage) -> tuple[bool, bool, int]:
        """Orders responses that say the same: by the ids of their calls, by their form, then the newest."""
        assert node.generated is not None
        has_ids = call_ids(message) == call_ids(node.generated.message)
        return has_ids, not changed_fields(message, node.generated), node.number

    def _root(self, context: ChatContext) -> Node:
        key = context_key(context)
        if key not in self._roots:
            self._roots[key] = Node(-1, None, None, packed_ids(()))
        return self._roots[key]

    def _rendered_child(
        self,
        parent: Node,
        key: bytes,
        message: ChatMessage | None,
        token_ids: Sequence[int],
        mm_ranges: Sequence[MediaRange] = (),
    ) -> Node:
        ids = packed_ids(token_ids)
        siblings = parent.rendered_children.setdefault(key, [])
        for node in siblings:
            if node.token_ids == ids:
                return node
        siblings.append(self._new_node(parent, message, ids, mm_ranges=mm_ranges))
        return siblings[-1]

    def _add_response(self, parent: Node, generated: GeneratedMessage) -> None:
        node = self._new_node(parent, generated.message, generated.token_ids, generated)
        self._generated[generated.id] = node
        for key in response_keys(generated):
            parent.responses.setdefault(key, []).append(node)
        self.generated_tokens += len(generated.token_ids)
        self.size_bytes += 4 * len(generated.logprobs) + len(generated.text)
        self.size_bytes += sum(len(column.data) for column in generated.columns.values())

    def _new_node(
        self,
        parent: Node,
        message: ChatMessage | None,
        token_ids: Sequence[int],
        generated: GeneratedMessage | None = None,
        mm_ranges: Sequence[MediaRange] = (),
    ) -> Node:
        node = Node(len(self._nodes), parent, message, token_ids, generated, mm_ranges)
        self._nodes.append(node)
        self.total_tokens += len(token_ids)
        self.size_bytes += _NODE_BYTES + 4 * len(token_ids) + len(repr(message))
        return node


def experts_up_to(last: Node) -> RoutedExperts:
    """The routed experts of the first tokens up to the node: each response has those that its call computed.

    A token keeps the ones with which the token after it was sampled, on the way to this node. A call that another model
    has answered adds none.
    """
    experts = RoutedExperts()
    for node in last.path():
        column = None if node.generated is None else node.generated.columns.get(EXPERTS)
        if column is not None and experts.takes(column):
            experts.add(column)
    return experts


def _spoken(last: Node | None) -> list[Node]:
    """The messages up to the node."""
    return [] if last is None else [node for node in last.path() if node.message is not None]


def _oldest_version(last: Node, policy: str | None) -> int | None:
    """The oldest version of the policy's tokens up to the node; `None` if it has generated none of them."""
    generated = (node.generated for node in last.path() if node.generated is not None)
    labels = (read_label(span.version) for one in generated for span in one.weight_versions)
    return min((label.number for label in labels if label.name == policy), default=None)
