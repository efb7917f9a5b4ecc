"""Everything that looks for something in the text of a model or a user: 1 MB of its worst text takes linear time.

In quadratic time most of these texts would take minutes or hours, and their test would reach its limit of time.
"""

import ast
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from starlette.datastructures import Headers

from deployments.chat import bridge, chat_template
from deployments.chat.text_encoder import _ControlTokens
from deployments.generation.serving import session_renderer
from deployments.policy import adapter_checks, trusted_trainers
from deployments.tasks import math_latex, replies, retrieval
from deployments.tasks.bridges import gymnasium, reasoning_gym, textarena
from deployments.tasks.replies import last_code_block
from rollout_client.calls import options
from rollout_client.cli.run import player
from rollout_client.weights import layout
from rollout_env.models import MARKERS_BESIDE_MOVES, escape_control_tokens
from rollout_env.tool_calls import reply_text, tool_calls_of
from service.access import keys
from service.http import middlewares, upload_chunk
from service.images import request_images
from service.jobs import submission
from service.model_server import call_bodies, call_images, tinker_dialect
from service.problems import RequestProblem
from tests.deployments.chat.vocabularies import tokenizer_of
from tests.paths import REPOSITORY

MEBIBYTE = 2**20
LINEAR_S = 6.0
"""Of processor time. The slowest of these readers takes a quarter of it, the fastest quadratic one took half more."""


class Reader(NamedTuple):
    """Something that reads text of others."""

    read: Callable[[Any], Any]
    worst: list[str]
    """Pieces, of which a text is made by repeating one."""
    patterns: tuple[str, ...] = ()
    """The regular expressions in it: `path::name` of the constant, or of the function that has the expression."""
    before: str = ""
    after: str = ""


def calls(text: str) -> Any:
    return tool_calls_of({"role": "assistant", "content": text})


CONTROL = _ControlTokens(tokenizer_of("byte-level"))


def hidden_and_restored(text: str) -> Any:
    [message] = CONTROL.hidden_in_observation([{"content": text}], "observations")
    return CONTROL.restored(message["content"])


def header(name: str, read: Callable[[Headers], Any]) -> Callable[[str], Any]:
    return lambda text: refused(lambda: read(Headers({name: text})))


def refused(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (RequestProblem, ValueError) as refusal:
        return refusal


MATH, LATEX = "deployments/tasks/replies.py", "deployments/tasks/math_latex.py"
CALLS = "clients/rollout_env/tool_calls.py"
BRIDGES, TRAINERS = "deployments/tasks/bridges", "deployments/policy/trusted_trainers.py"
CHUNKS = "service/http/upload_chunk.py"
PREFERENCES = "service/jobs/submission.py"
TINKER = "service/model_server/tinker_dialect.py"
TAGS = ["<action>", "<action>a", "</action>", "<action></action>", "<"]
ANSWERS = [
    *("answer:", "answer:\n", "answer ", "Answer: x ", "Answer: x\n", "*", " ", "\n", "\\boxed{", "a", "x ", "\\fbox{"),
    *("answer: \\boxed{", "$", "\\text{", "(a) ", "Answer: (a ", "\\boxed\n"),
]
READERS = {
    "code block": Reader(
        last_code_block,
        [
            *("```python\n", "```\n", " ```", "\n", "```", "``` ", "\t", "```x\n```\n", "```python\na\n````\n"),
            *("`", "~", "~~~\n", "{", "1", "1. ", "- ", "py3.", "\t~~~\n", " ~~~py\n\t"),
        ],
        tuple(f"deployments/tasks/replies.py::{name}" for name in ("_OPENING", "_PYTHON")),
    ),
    "tool calls": Reader(
        calls,
        [
            *("<tool_call>", "<tool_call><function=", "<tool_call>{}", "<tool_call>[", "<tool_call>{}</tool_call>"),
            *("<function=", "<function=a>", "<function=a><parameter=", "<function=a><parameter=b>", "<tool_call>\n"),
            *("<function=a><parameter=b></parameter>", "<function=a>b</function>", "{", "[", '{"'),
            *("[TOOL_CALLS]", "[TOOL_CALLS]a", "[TOOL_CALLS]a ", "[TOOL_CALLS] [", "[TOOL_CALLS]a{}", "[TOOL_CALLS]a{"),
            *("<|python_tag|>", "<|python_tag|>{};", '{"name": "a", "arguments": {}};', '{"name": "a", "parameters":'),
            *("[a(", "[a()", "[a() ", "[a.", "[ ", "[a() ) "),
        ],
        tuple(f"{CALLS}::{name}" for name in ("HERMES", "FUNCTION", "PARAMETER", "MISTRAL_CALL", "PYTHON")),
    ),
    "calls behind Llama's marker": Reader(calls, ["1;", "{};", "{} ", "[", "{", ";", '{"a":'], before="<|python_tag|>"),
    "a call behind Mistral's marker": Reader(calls, ["a", " ", "a ", "[", "{", "a{", "[ARGS]"], before="[TOOL_CALLS]"),
    "calls in Python": Reader(calls, [")", " ", ") ", ")]", "a", "(", ")\n", "]"], before="[a("),
    "thought": Reader(
        lambda text: reply_text({"role": "assistant", "content": text}), ["<think>", "</think>", "<think></think>"]
    ),
    "box": Reader(
        replies.last_box,
        ["\\boxed{", "\\boxed", "\\boxed ", "\\fbox{", "\\", "{", "}", "\\boxed{}", "{}"],
        (f"{MATH}::_BOX_PARTS",),
    ),
    "answer anywhere": Reader(lambda text: replies.answer_in(text, "any"), ANSWERS),
    "answer in a box": Reader(lambda text: replies.answer_in(text, "boxed"), ANSWERS),
    "answer in a line": Reader(
        lambda text: replies.answer_in(text, "answer_line"), ANSWERS, (f"{MATH}::_ANSWER_LINE",)
    ),
    "answer in the last line": Reader(
        lambda text: replies.answer_in(text, "answer_line"),
        ["x ", " ", "$", "*"],
        (f"{MATH}::_BEGINS_WITH_ANSWER",),
        before="Answer:",
        after="\n.",
    ),
    "choice": Reader(lambda text: replies.answer_in(text, "choice"), ANSWERS),
    "letter": Reader(replies.letter_of, ["A", "(", " ", "A ", "A)", "*", "A*", "\\text{", "A}"], (f"{MATH}::_LETTER",)),
    "answer in LaTeX": Reader(
        math_latex.normalized,
        [
            *(
                "1",
                "1 ",
                "100 ",
                "100\\,",
                "100,",
                "1\\,000,5",
                "{,}100",
                "\\!",
                "\\ ",
                "~",
                "\\hspace{",
                "\\SI{",
                "\\SI[",
                "1.5",
            ),
            *(
                "\\SI{1}",
                "\\SI[a]{1}",
                "\\num{",
                "\\unit[",
                "\\ldots",
                "...",
                ",...",
                "1.1\\ldots",
                "\\text{",
                "\\text ",
                "1e5",
            ),
            *(
                "\\text{a}",
                "1\\text{a}",
                "1\\text{1",
                "\\text{1}",
                "\\text{and}",
                ",\\text{",
                "\\text{a\\,",
                "\\text{a^2",
                "\\bm{",
            ),
            *(
                "\\bm{1}",
                "{\\bf",
                "{ ",
                "**",
                "**a",
                "a**",
                "**a** ",
                "1^\\circ",
                "1^{",
                "1^\\circ C",
                "1 cm^2",
                "1km/h",
                "1.",
                "_",
            ),
            *(
                "1 1/",
                "1 1/2 ",
                "1 1/2",
                "/",
                "1.1\\bar{",
                "1.\\bar{1}",
                "\\boxed{=",
                "\\boxed",
                "\\lbrace",
                "1\\cdot",
                "}",
                "} ",
            ),
            *(
                "1 a",
                "a ",
                "1 a ",
                "1 a,",
                "1 and ",
                "a and 1",
                "a-",
                "1 a/",
                "1 a-a ",
                "人",
                "1) ",
                "pi",
                "sqrt(",
                "sqrt(1",
            ),
        ],
        tuple(f"{LATEX}::{name}" for name in ("COMPILED", "NUMBER", "NO_UNIT", "WORD_OR_VARIABLES")),
    ),
    "prose": Reader(
        math_latex.is_prose,
        ["a", "abc ", "is ", "\\text{", "\\text{a}", "\\begin{", "\\a", "\\", "{", "答", "ABC ", "1"],
        tuple(f"{LATEX}::{name}" for name in ("NO_WORDS", "WORD", "CJK_SENTENCE", "OF_A_FORMULA", "is_prose")),
    ),
    "answer as a text": Reader(
        math_latex.as_text,
        ["a", "abc ", " ", ".", "\\text{", "\\text ", "\\text{a}", "\\(", "$", "{", "}", "\\boxed", "\\boxed{", "\n"],
        tuple(f"{LATEX}::{name}" for name in ("DELIMITERS", "WRAPPED")),
    ),
    "retrieval's answer": Reader(
        lambda text: retrieval._normalized(retrieval._answer_in(text)),
        ["<answer>", "</answer>", "<answer></answer>", "a ", "the ", "a", "!", " "],
        ("deployments/tasks/retrieval.py::_ARTICLES",),
    ),
    "boxed or whole answer": Reader(replies.boxed_or_whole, ["\\boxed{", "\\boxed", "\\boxed{}", "\\boxed{a", "{"]),
    "control tokens in a text": Reader(
        hidden_and_restored,
        ["<", "<|im_", "<|im_end|>", "<tool_response", "q", "q0q", " "],
        tuple(f"deployments/chat/text_encoder.py::{name}" for name in ("__init__", "_alternatives")),
    ),
    "control tokens in a text for another model": Reader(
        escape_control_tokens, ["<", "[", "[/", "[a", "[aA", "]"], ("clients/rollout_env/models.py::MARKER_CHARACTERS",)
    ),
    "control tokens in a game": Reader(
        lambda text: escape_control_tokens(text, MARKERS_BESIDE_MOVES),
        ["<", "[", "[/", "[IMG", "[TOOL_A", "[UNUSED0", "A", "[INST", "]"],
        ("clients/rollout_env/models.py::MARKERS_BESIDE_MOVES",),
    ),
    "marks in a rendering": Reader(
        chat_template.MARK.split,
        ["\ue000", "\ue0001", "\ue000\ue001", "\ue0001\ue001", "1"],
        ("deployments/chat/chat_template.py::MARK",),
    ),
    "numbers of calls in a rendering": Reader(
        lambda text: bridge._NUMBER.sub("", text), ["1", "1a", "a"], ("deployments/chat/bridge.py::_NUMBER",)
    ),
    "name of an adapter's tensor": Reader(
        adapter_checks.MATRIX.fullmatch,
        ["a", ".", ".lora_A", ".lora_A.weight", ".lora_embedding_A", "a\n"],
        ("deployments/policy/adapter_checks.py::MATRIX",),
    ),
    "name of a call's image": Reader(
        session_renderer.IMAGE_NAMES.fullmatch,
        ["sha256:", "a", "0a\n"],
        ("deployments/generation/serving/session_renderer.py::IMAGE_NAMES",),
        before="sha256:",
    ),
    "beginning of a data URL": Reader(
        request_images.DATA_URL.match,
        ["data:", "data:image/png;base64,", "A"],
        ("service/images/request_images.py::DATA_URL",),
    ),
    "source of a call's image": Reader(
        call_images._SOURCE.match,
        ["sha256:", "a", "data:", "http://"],
        ("service/model_server/call_images.py::_SOURCE",),
        before="sha256:",
    ),
    "an action": Reader(lambda text: replies.last_tagged(text, "action"), TAGS),
    "gymnasium's rendering": Reader(
        gymnasium._plain_text,
        ["\x1b[1m", "\x1b[", "\x1b[1;", "\x1b[0m", "1;", "\x1b[31ma", "\x1b[41m"],
        (f"{BRIDGES}/gymnasium.py::_COLOURED",),
    ),
    "textarena's moves": Reader(
        textarena._IN_BRACKETS.findall, ["[", "[a", "[a]", "]", "a"], (f"{BRIDGES}/textarena.py::_IN_BRACKETS",)
    ),
    "reasoning_gym's expression": Reader(
        lambda text: refused(lambda: reasoning_gym._refuse_unknown_names(text)),
        ["a", "1", "1.", ".1", "a1", "(", "1a ", ". ", "x ", "1_", "((x"],
        (f"{BRIDGES}/reasoning_gym.py::_EXPRESSION", f"{BRIDGES}/reasoning_gym.py::_refuse_unknown_names"),
    ),
    "trusted trainer": Reader(
        lambda text: refused(lambda: trusted_trainers.TrustedTrainer.parse(text)),
        ["[", "a:", "1:1-", "a", "[a]:1", "]:", "1", "a.", "-"],
        tuple(f"{TRAINERS}::{name}" for name in ("ENTRY", "NUMERIC", "HOST_NAME")),
        after=":1",
    ),
    "key": Reader(lambda text: keys.KEY.sub("", text), ["rollout-", "rollout", "a"], ("service/access/keys.py::KEY",)),
    "key to send": Reader(
        options.CAN_BE_SENT.fullmatch, ["a", "~"], ("clients/rollout_client/calls/options.py::CAN_BE_SENT",), after=" "
    ),
    "request id": Reader(middlewares.ALLOWED_ID.fullmatch, ["a"], ("service/http/middlewares.py::ALLOWED_ID",)),
    "host": Reader(
        middlewares._LOOPBACK_NAME.fullmatch,
        ["1", ":", ".", "a"],
        ("service/http/middlewares.py::_LOOPBACK_NAME",),
        "localhost:",
    ),
    "idempotency key": Reader(
        header("idempotency-key", submission.idempotency_key),
        ["a", '"', '"a', "\\", '\\"'],
        (f"{PREFERENCES}::KEY", f"{PREFERENCES}::idempotency_key"),
    ),
    "preference": Reader(
        header("prefer", submission.heartbeat_s),
        ["heartbeat=", ",", ", ", " ", ";", "1", "=", '"'],
        (f"{PREFERENCES}::PREFERENCE",),
        "heartbeat=",
    ),
    "byte range": Reader(
        lambda text: refused(lambda: upload_chunk._byte_range(text)),
        ["1", "-", "/"],
        (f"{CHUNKS}::_byte_range",),
        "bytes ",
    ),
    "digest of weights": Reader(
        lambda text: refused(lambda: upload_chunk._weights_digest(text)), ["a", "0"], (f"{CHUNKS}::_weights_digest",)
    ),
    "lone surrogate": Reader(
        lambda text: refused(lambda: call_bodies._parsed(text.encode("latin-1"))),
        ["\\ud800\\udc00", "\\ud800", "\\\\ud800", '\\"', '\\"a', '\\"a\\": ', "\xed", "a"],
        before='{"a": "\\ud800',
        after='"}',
    ),
    "row of a problem": Reader(
        player.INDEX.match,
        ["samples[", "1", "samples[1]"],
        ("clients/rollout_client/cli/run/player.py::INDEX",),
        "samples[",
    ),
    "model path of Tinker": Reader(
        lambda text: refused(lambda: tinker_dialect._demand_of(text)),
        ["a", "1", "/", "a/", "sampler_weights/", "a/sampler_weights/", "a/1", "."],
        (f"{TINKER}::_MODEL_PATH",),
        before="tinker://",
    ),
    "sampler of Tinker": Reader(
        lambda text: refused(lambda: tinker_dialect.Sampler.of_id(text)),
        ["a", "1", ":", ":1", "a:1:", "."],
        (f"{TINKER}::_SAMPLER",),
        before=f"{'0' * 32}-",
    ),
    "name of a tensor": Reader(
        lambda text: layout.WRAPPERS.sub("", text),
        ["module.", "_orig_mod.", "base_model.", "base_model.model.", "a.", "_"],
        ("clients/rollout_client/weights/layout.py::WRAPPERS",),
    ),
}
OF_OUR_OWN_TEXT = {
    "clients/generate_sync.py::ASYNC_NAME": "our source",
    "clients/generate_sync.py::ASYNC_WORDS": "our source",
    "clients/rollout_client/calls/json_values.py::CONVERTED": "the name of a dtype",
    "clients/rollout_env/scaffold.py::write_environment": "an argument of a command",
    "clients/rollout_load/users.py::kind_of": "the name of a class",
    "deployments/data/rows.py::LINE": "a file that the config names",
    "deployments/generation/serving/grammar_checks.py::WHERE": "the beginning of a message of xgrammar",
    "deployments/harbor/tasks.py::CANARY": "a file of a task in the config's folder",
    "deployments/harbor/tasks.py::TEMPLATE": "a file of a task in the config's folder",
    "deployments/sandbox/providers/dockerfile.py::VARIABLE": "a file of a task in the config's folder",
    "deployments/sandbox/providers/dockerfile.py::build_plan": "a file of a task in the config's folder",
    "deployments/policy/published.py::NUMBERED": "a name in the config's folder",
    "service/startup/generated_config.py::_task_name_of": "the name of a class",
    "service/startup/readiness.py::_NO_ROOM": "a message of Serve",
    "service/startup/readiness.py::_REFUSAL": "a traceback",
    "service/startup/readiness.py::_RAY_FRAME": "a traceback",
}
"""Expressions for what neither a model nor a caller writes."""


@pytest.mark.slow
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("reader", "piece"),
    [pytest.param(reader, piece, id=f"{name}-{piece!r}") for name, reader in READERS.items() for piece in reader.worst],
)
def test_a_megabyte_of_the_worst_text_is_read_in_linear_time(reader: Reader, piece: str) -> None:
    text = f"{reader.before}{piece * (MEBIBYTE // len(piece))}{reader.after}"
    start = time.process_time()
    reader.read(text)
    assert time.process_time() - start < LINEAR_S


def test_every_regular_expression_is_known_here() -> None:
    found = {name for folder in ("service", "deployments", "clients") for name in expressions_below(folder)}
    read = [name for reader in READERS.values() for name in reader.patterns]
    assert sorted(found) == sorted([*read, *OF_OUR_OWN_TEXT])


def expressions_below(folder: str) -> Iterator[str]:
    """`path::name` of each use of the module `re` with an expression."""
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "re." in text:
            for name in names_of_expressions(ast.parse(text)):
                yield f"{path.relative_to(REPOSITORY)}::{name}"


def names_of_expressions(tree: ast.Module) -> Iterator[str]:
    for statement in ast.walk(tree):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and has_expression(statement):
            yield statement.name
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            target, value = statement.targets[0], statement.value
            pairs = zip(target.elts, value.elts, strict=True) if isinstance(target, ast.Tuple) else [(target, value)]  # type: ignore[attr-defined]
            yield from (ast.unparse(name) for name, part in pairs if has_expression(part))


def has_expression(tree: ast.AST) -> bool:
    functions = ("compile", "search", "match", "fullmatch", "findall", "finditer", "sub", "split")
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in functions
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
        for node in ast.walk(tree)
    )
