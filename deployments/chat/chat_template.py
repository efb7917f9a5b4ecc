"""The model's chat template: messages to text, and where each message of the text ends.

The ends are found by a number of renderings that does not grow with the text. A template writes the messages in a loop,
so the message of an iteration owns what the iteration writes. Templates are compiled a second time with marks at the
iterations of their loops; the marked rendering without its marks must be the rendering itself, or it is not used.
Templates put some text between two messages on the wrong side of the loop: a closing marker that the next message
writes, or one that only a message writes which is not the last. So the first messages are rendered alone, once for each
pair of neighbouring roles, and show where messages of such roles end.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, cast

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.visitor import NodeTransformer
from transformers import PreTrainedTokenizerFast

# The environment in which transformers renders templates is not public: filters, globals, extensions, the sandbox.
from transformers.utils.chat_template_utils import _compile_jinja_template

from deployments.protocols.chat import ChatOptions

Chat = Sequence[Mapping[str, Any]]
RENDERING_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError)
"""Exceptions that a template can raise on messages that it was not written for."""
MARK = re.compile("\ue000([0-9]*)\ue001")
"""The number of the message that writes the text after the mark; none: no message does."""
MOST_SAMPLES = 2
"""Prefixes rendered for messages of the same roles, until the template renders one as the beginning of the whole."""
FEW = 4
"""As many prefixes cost no more than finding out how the template's loop goes."""
MOST_PREFIXES = 64
"""Prefixes rendered with a template whose loop does not show the messages: one that counts them, for example."""


def _kind_of(message: Mapping[str, Any]) -> tuple[object, ...]:
    return message.get("role"), bool(message.get("tool_calls")), bool(message.get("content"))


class _Marks:
    """Writes the marks of one rendering."""

    def __init__(self, chat: Chat) -> None:
        self.chat: Chat = [{**message} for message in chat]
        """Copies, which are told apart by what they are, not by what they say."""
        self._numbers = {id(message): number for number, message in enumerate(self.chat)}
        self._within: list[tuple[int, int, bool]] = []
        """The loops that are running for messages: the loop, its message, and whether the loop is over messages."""

    def enter(self, loop: int, item: object, is_own: bool) -> str:
        """An iteration of a loop begins, or finds its message by an index. Marks it.

        Args:
            is_own: whether the loop is over the item, which then is its message, whichever others it looks at.
        """
        number = self._numbers.get(id(item))
        if number is None:
            return ""
        if self._within and self._within[-1][0] == loop:
            if self._within[-1][2] and not is_own:
                return ""
            self._within.pop()
        self._within.append((loop, number, is_own))
        return self._mark()

    def leave(self, loop: int) -> str:
        """A loop has ended: what follows is of the message that it ran for, if it was within another loop."""
        if not self._within or self._within[-1][0] != loop:
            return ""
        self._within.pop()
        return self._mark()

    def _mark(self) -> str:
        return f"\ue000{self._within[-1][1] if self._within else ''}\ue001"


@lru_cache(maxsize=16)
def _marked_template(source: str) -> Template:
    """The chat template as transformers compiles it, and besides with calls of `enter_iteration` and `leave_loop`."""
    environment = _compile_jinja_template(source).environment
    tree: nodes.Template = _MarkLoops(environment).visit(environment.parse(source))
    code: Any = environment.compile(tree)
    return cast(Template, environment.template_class.from_code(environment, code, environment.globals))


class _MarkLoops(NodeTransformer):
    """Adds calls to the loops of a template: where they have an item, and after them."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._loops = 0
        self._around: list[int] = []
        """The loops around the node that is visited."""

    def visit_For(self, loop: nodes.For) -> list[nodes.Node]:  # noqa: N802  # jinja2 calls it by its node's name
        self._loops += 1
        number = self._loops
        self._around.append(number)
        self.generic_visit(loop)
        self._around.pop()
        if isinstance(loop.target, nodes.Name):
            loop.body.insert(0, self._enter(number, loop.target, is_own=True))
        return [loop, self._output(loop, "leave_loop", [nodes.Const(number)])]

    def visit_Assign(self, assign: nodes.Assign) -> list[nodes.Node]:  # noqa: N802
        if not self._around or not isinstance(assign.target, nodes.Name):
            return [assign]
        return [assign, self._enter(self._around[-1], assign.target, is_own=False)]

    def _enter(self, loop: int, item: nodes.Name, is_own: bool) -> nodes.Output:
        arguments = [nodes.Const(loop), nodes.Name(item.name, "load"), nodes.Const(is_own)]
        return self._output(item, "enter_iteration", arguments)

    def _output(self, place: nodes.Node, function: str, arguments: list[nodes.Expr]) -> nodes.Output:
        output = nodes.Output([nodes.Call(nodes.Name(function, "load"), arguments, [], None, None)])
        for node in [output, *output.find_all(nodes.Node)]:
            node.set_lineno(place.lineno)
            node.set_environment(self._environment)
        return output


def _with_parts(chat: Chat) -> Chat:
    """The messages as templates take images: those before a text are parts of a content."""
    return [_with_image_parts(message) if message.get("images") else message for message in chat]


def _with_image_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    parts: list[dict[str, str]] = [{"type": "image"} for _ in message["images"]]
    if message["content"]:
        parts.append({"type": "text", "text": message["content"]})
    return {name: value for name, value in message.items() if name != "images"} | {"content": parts}


RENDERING_ARGUMENTS = {"messages", *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters}
"""The parameters of `apply_chat_template`; all other keyword arguments reach the template."""


class ChatTemplate:
    """Renders with the tokenizer's own template. Raises `RENDERING_ERRORS` for messages that the template refuses."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def render(self, chat: Chat, options: ChatOptions, add_generation_prompt: bool = True) -> str:
        conversation: Any = _with_parts(chat)
        return str(
            self._tokenizer.apply_chat_template(
                conversation,
                tools=options.tools,  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **(options.chat_template_kwargs or {}),
            )
        )

    def with_contents(self, chat: Chat, options: ChatOptions) -> Chat:
        """The messages with an empty text for content that is missing, where the template needs a text.

        Templates disagree about a message of calls alone. Some write its calls only if its content is null; others
        write `None`, or raise an error.
        """
        if all(message.get("content") is not None for message in chat):
            return chat
        null = [{**message, "content": message.get("content")} for message in chat]
        empty = [{**message, "content": "" if message["content"] is None else message["content"]} for message in null]
        try:
            text = self.render(null, options)
        except RENDERING_ERRORS:
            return empty
        try:
            return empty if text.count("None") > self.render(empty, options).count("None") else null
        except RENDERING_ERRORS:
            return null

    def cuts(self, chat: Chat, text: str, options: ChatOptions, first: int = 0) -> list[int]:
        """The indexes in `text`, the rendering of `chat` with a generation prompt, at which its messages end, from
        number `first` on, the last one left out. They never decrease.

        Where the first messages, rendered alone, are the beginning of the whole, they end with that rendering. A
        message that the template refuses as a last one, or writes otherwise there, ends where the next one begins.
        """
        chat, places = _with_parts(chat), range(first + 1, len(chat))
        end_of = partial(self._prefix_end, chat, text, options)
        ends: list[int | None] = [None]
        if len(places) <= FEW:
            ends = [*map(end_of, places)]
        if None in ends:
            begins = self._beginnings(chat, text, options)
            if begins is None:
                ends = [*map(end_of, places[:MOST_PREFIXES]), *([None] * len(places[MOST_PREFIXES:]))]
            else:
                ends = [*_shifted(chat, text, places, begins, end_of)]
        return list(accumulate((end or 0 for end in ends), max))

    def _prefix_end(self, chat: Chat, text: str, options: ChatOptions, place: int) -> int | None:
        """The length of the rendering of the messages before `place`, without a generation prompt; `None` if the
        template refuses them or renders them otherwise in the whole."""
        try:
            rendered = self.render(chat[:place], options, False)
        except RENDERING_ERRORS:
            return None
        return len(rendered) if text.startswith(rendered) else None

    def _beginnings(self, chat: Chat, text: str, options: ChatOptions) -> list[tuple[int, bool]] | None:
        """The index at which each message or a later one begins, and whether it is this one; `None` if the template's
        loops show no message."""
        marks, tokenizer = _Marks(chat), self._tokenizer
        source: Any = tokenizer.get_chat_template(None, options.tools)
        given = {"tools": options.tools, "documents": None, **tokenizer.special_tokens_map}
        try:
            marked = _marked_template(source).render(
                messages=marks.chat,
                add_generation_prompt=True,
                **given | (options.chat_template_kwargs or {}),
                enter_iteration=marks.enter,
                leave_loop=marks.leave,
            )
        except RENDERING_ERRORS:
            return None
        pieces = MARK.split(marked)
        if "".join(pieces[::2]) != text:
            return None
        first: dict[int, int] = {}
        position, last = len(pieces[0]), 0
        for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            if number and piece.strip():
                first.setdefault(int(number), position)
                last = max(last, position + len(piece))
            position += len(piece)
        if not first:
            return None
        begins = accumulate((first.get(place, last) for place in reversed(range(len(chat)))), min)
        return [(begin, place in first) for place, begin in enumerate([*begins][::-1])]


def _shifted(
    chat: Chat, text: str, places: range, begins: Sequence[tuple[int, bool]], end_of: Callable[[int], int | None]
) -> Iterator[int]:
    """Where the message before each place ends, by where the loop begins the one at it."""
    samples: Counter[tuple[object, ...]] = Counter()
    shifts: dict[tuple[object, ...], tuple[int, str]] = {}
    prefixes = 0
    for place in places:
        begin, is_shown = begins[place]
        if not is_shown and prefixes < MOST_PREFIXES:
            # A template that puts messages together writes copies of them, which its loop does not show.
            prefixes += 1
            yield end_of(place) or begin
            continue
        kind = (*_kind_of(chat[place - 1]), *_kind_of(chat[place]))
        if kind not in shifts and samples[kind] < MOST_SAMPLES:
            samples[kind] += 1
            end = end_of(place)
            if end is not None:
                shifts[kind] = end - begin, text[min(begin, end) : max(begin, end)]
        shift, between = shifts.get(kind, (0, ""))
        yield begin + shift if text.startswith(between, max(begin + min(shift, 0), 0)) else begin
