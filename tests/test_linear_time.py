"""What looks for something in a model's text reads half a MB of its worst text in linear time, as do readers of bodies.

In quadratic time most of these texts would take minutes or hours, and their test would reach its limit of time. Other
texts are bounded by their length, as headers are, or written by the operator.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from deployments.chat.bridge import _NUMBER
from deployments.chat.chat_template import MARK
from deployments.chat.text_encoder import _ControlTokens
from deployments.policy.adapter_checks import MATRIX
from deployments.tasks.bridges.reasoning_gym import _refuse_unknown_names
from deployments.tasks.bridges.textarena import _IN_BRACKETS
from deployments.tasks.math_latex import as_text, is_prose, normalized
from deployments.tasks.replies import answer_in, boxed_or_whole, last_box, last_code_block, last_tagged, letter_of
from deployments.tasks.retrieval import _answer_in
from deployments.tasks.retrieval import _normalized as normalized_words
from rollout_client.weights.layout import WRAPPERS
from rollout_env.models import MARKERS_BESIDE_MOVES, escape_control_tokens
from rollout_env.tool_calls import reply_text, tool_calls_of
from service.images.request_images import DATA_URL
from service.model_server.call_bodies import _parsed
from service.problems import RequestProblem
from tests.deployments.chat.vocabularies import tokenizer_of

HALF_A_MEBIBYTE = 2**19
LINEAR_S = 2.0
"""Of processor time. The slowest of these readers takes a third of it, the fastest quadratic one took more."""
CONTROL = _ControlTokens(tokenizer_of("byte-level"))


def said(read: Callable[[Any], Any], text: str) -> Any:
    return read({"role": "assistant", "content": text})


def hidden_and_restored(text: str) -> Any:
    [message] = CONTROL.hidden_in_observation([{"content": text}], "observations")
    return CONTROL.restored(message["content"])


CALLS = (
    '<tool_call>·<tool_call><function=·<tool_call>{}·<tool_call>[·<tool_call>{}</tool_call>·<function=·<function=a>·{·[·{"·'
    "<function=a><parameter=·<function=a><parameter=b>·<function=a><parameter=b></parameter>·<function=a>b</function>·"
    "[TOOL_CALLS]·[TOOL_CALLS]a·[TOOL_CALLS]a ·[TOOL_CALLS] [·[TOOL_CALLS]a{}·[TOOL_CALLS]a{·<|python_tag|>{};·[a() ) ·"
    '{"name": "a", "arguments": {}};·{"name": "a", "parameters":·[a(·[a()·[a() ·[a.·[ ·<|python_tag|>·<tool_call>\n'
)
ANSWERS = (
    r"answer:·answer ·Answer: x ·*· ·\boxed{·a·x ·\fbox{·answer: \boxed{·$·\text{·(a) ·Answer: (a " + "·answer:\n·\n"
)
LATEX = (
    r"1·1 ·100 ·100\,·100,·1\,000,5·{,}100·\!·\ ·~·\hspace{·\SI{·\SI[·1.5·\SI{1}·\SI[a]{1}·\num{·\unit[·\ldots·...·,..."
    r"·1.1\ldots·\text{·\text ·1e5·\text{a}·1\text{a}·1\text{1·\text{1}·\text{and}·,\text{·\text{a\,·\text{a^2·\bm{"
    r"·\bm{1}·{\bf·{ ·**·**a·a**·**a** ·1^\circ·1^{·1^\circ C·1 cm^2·1km/h·1.·_·1 1/·1 1/2 ·1 1/2·/·1.1\bar{·1.\bar{1}"
    r"·\boxed{=·\boxed·\lbrace·1\cdot·}·} ·1 a·a ·1 a ·1 a,·1 and ·a and 1·a-·1 a/·1 a-a ·人·1) ·pi·sqrt(·sqrt(1"
)
READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "code block": (
        last_code_block,
        "```python\n·```\n· ```·\n·```·``` ·\t·```x\n```\n·`·~·~~~\n·{·1. ·- ·py3.·\t~~~\n",
    ),
    "tool calls": (partial(said, tool_calls_of), CALLS),
    "thought": (partial(said, reply_text), "<think>·</think>·<think></think>"),
    "box": (last_box, r"\boxed{·\boxed·\boxed ·\fbox{·\·{·}·\boxed{}·{}"),
    "boxed or whole": (boxed_or_whole, r"\boxed{·\boxed·\boxed{}·\boxed{a·{"),
    **{f"answer {how}": (partial(answer_in, form=how), ANSWERS) for how in ("any", "boxed", "answer_line", "choice")},
    "letter": (letter_of, r"A·(· ·A ·A)·*·A*·\text{·A}"),
    "answer in LaTeX": (normalized, LATEX),
    "prose": (is_prose, r"a·abc ·is ·\text{·\text{a}·\begin{·\a·\·{·答·ABC ·1"),
    "answer as a text": (as_text, r"a·abc · ·.·\text{·\text ·\text{a}·\(·$·{·}·\boxed·\boxed{"),
    "answer of a search": (_answer_in, "<answer>·</answer>·<answer></answer>"),
    "words of an answer": (normalized_words, "a ·the ·a·!· "),
    "an action": (partial(last_tagged, tag="action"), "<action>·<action>a·</action>·<action></action>·<"),
    "moves": (_IN_BRACKETS.findall, "[·[a·[a]·]·a"),
    "expression": (_refuse_unknown_names, "a·1·1.·.1·a1·(·1a ·. ·x ·1_·((x"),
    "control tokens": (hidden_and_restored, "<·<|im_·<|im_end|>·<tool_response·q·q0q· "),
    "control tokens for another model": (escape_control_tokens, "<·[·[/·[a·[aA·]"),
    "control tokens in a game": (
        partial(escape_control_tokens, markers=MARKERS_BESIDE_MOVES),
        "<·[·[/·[IMG·[TOOL_A·[UNUSED0·A·[INST·]",
    ),
    "marks in a rendering": (MARK.split, "\ue000·\ue0001·\ue000\ue001·\ue0001\ue001·1"),
    "numbers of calls": (partial(_NUMBER.sub, ""), "1·1a·a"),
    # Of bodies.
    "tensor of an adapter": (MATRIX.fullmatch, "a·.·.lora_A·.lora_A.weight·.lora_embedding_A"),
    "name of a tensor": (partial(WRAPPERS.sub, ""), "module.·_orig_mod.·base_model.·base_model.model.·a.·_"),
    "data URL": (DATA_URL.match, "data:·data:image/png;base64,·A"),
    "lone surrogate": (
        lambda text: _parsed(f'{{"a": "\\ud800{text}"}}'.encode("latin-1")),
        r"\ud800\udc00·\ud800·\\ud800·\"·\"a·\"a\": ·a",
    ),
}
"""Each reader, and pieces of which a text is made by repeating one."""
BEGUN = [
    ("tool calls", "<|python_tag|>", "1;·{};·{} ·[·{·;"),
    ("tool calls", "[TOOL_CALLS]", "a· ·a ·[·{·a{·[ARGS]"),
    ("tool calls", "[a(", ")· ·) ·)]·a·(·]"),
    ("answer answer_line", "Answer:", "x · ·$·*"),
]
"""Readers whose worst texts have a beginning."""
WORST = [(name, "", piece) for name, (_, pieces) in READERS.items() for piece in pieces.split("·")]


@pytest.mark.slow
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("name", "before", "piece"),
    [*WORST, *((name, before, piece) for name, before, pieces in BEGUN for piece in pieces.split("·"))],
)
def test_half_a_megabyte_of_the_worst_text_is_read_in_linear_time(name: str, before: str, piece: str) -> None:
    read, text = READERS[name][0], before + piece * (HALF_A_MEBIBYTE // len(piece))
    start = time.process_time()
    with suppress(ValueError, RequestProblem):
        read(text)
    assert time.process_time() - start < LINEAR_S
