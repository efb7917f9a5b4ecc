"""Skills with tools: a calculator, a search of documents, and tools of any name and parameters."""

import ast
import operator
import random
from collections.abc import Callable
from typing import Any

from deployments.tasks.replies import last_box
from models.small.recipe.exercises import Exercise, call, invented_name, number, reply, result, tool_schema

CALCULATOR = tool_schema("calculator", "Evaluates an arithmetic expression.", {"expression": "string"})
SEARCH = tool_schema("search", "Searches documents.", {"query": "string"})
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
LONGEST_EXPRESSION = 200
NO_DOCUMENT = "No document found."


def calculate(expression: str) -> str:
    """The value of sums, differences and products of whole numbers; an error as text for anything else."""

    def value_of(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value_of(left), value_of(right))
        raise ValueError("only +, - and * of whole numbers are known")

    try:
        if len(expression) > LONGEST_EXPRESSION:
            raise ValueError("the expression is too long")
        return str(value_of(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError) as error:
        return f"Error: {error}"


WORD_PROBLEMS = (
    ("A box holds {a} pens. How many pens are in {b} boxes?", "{a} * {b}"),
    ("{name} has {a} apples and buys {b} more. How many apples are there?", "{a} + {b}"),
    ("{name} has {a} coins and gives away {b}. How many coins are left?", "{a} - {b}"),
    ("{name} earns {a} a day and pays {b} a day for food. How much is saved in {c} days?", "({a} - {b}) * {c}"),
    ("There are {a} rows of {b} seats and {c} seats more. How many seats are there?", "{a} * {b} + {c}"),
)
DIRECT_QUESTIONS = ("What is {}?", "Compute {}.", "Calculate {}.")
EXPRESSIONS = ("{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} * {b}", "({a} + {b}) * {c}", "{a} * {b} - {c}")


def calculator(draw: random.Random) -> Exercise:
    """A calculation, or a problem in words, of which the thought is the expression."""
    numbers: dict[str, Any] = {letter: number(draw, 4) for letter in "abc"} | {"name": invented_name(draw)}
    if draw.random() < 0.5:
        expression, thought = draw.choice(EXPRESSIONS).format(**numbers), ""
        question = draw.choice(DIRECT_QUESTIONS).format(expression)
    else:
        words, form = draw.choice(WORD_PROBLEMS)
        question, expression = words.format(**numbers), form.format(**numbers)
        thought = expression
    value = calculate(expression)
    return Exercise(
        question,
        [call("calculator", {"expression": expression}, thought), result(value), reply(f"\\boxed{{{value}}}")],
        lambda said: last_box(said) == value,
        tools_among(draw, CALCULATOR),
        {"calculator": lambda arguments: calculate(str(arguments.get("expression")))},
        asks_for_call=True,
    )


JOBS = ("baker", "pilot", "singer", "farmer", "doctor", "painter", "sailor", "teacher")


def search(draw: random.Random) -> Exercise:
    """A fact about an invented person, or, by a second search, about the place where the person lives.

    Questions, documents and results are as in the task `retrieval`.
    """
    names = [f"{invented_name(draw)} {invented_name(draw)}" for _ in range(2)]
    cities, countries = ([invented_name(draw) for _ in range(2)] for _ in range(2))
    jobs = draw.sample(JOBS, 2)
    people = [f"{name} is a {job} and lives in {city}." for name, job, city in zip(names, jobs, cities, strict=True)]
    places = [f"{city} is a town in {country}." for city, country in zip(cities, countries, strict=True)]
    ids = [*(f"person-{draw.randrange(200)}" for _ in names), *(f"town-{draw.randrange(40)}" for _ in cities)]
    texts = [
        f"[{id_}] {subject}\n{text}"
        for id_, subject, text in zip(ids, [*names, *cities], [*people, *places], strict=True)
    ]
    documents = dict(zip([*names, *cities], texts, strict=True))
    others = draw.randrange(3)

    def found(arguments: dict[str, Any]) -> str:
        """The document whose subject the query names, then up to two others."""
        query = str(arguments.get("query"))
        hits = [text for subject, text in documents.items() if subject in query][:1]
        return "\n".join([*hits, *[text for text in texts if text not in hits][:others]]) if hits else NO_DOCUMENT

    name, city, country, job = names[0], cities[0], countries[0], jobs[0]
    question, answer, subjects = draw.choice(
        [
            (f"Where does {name} live?", city, [name]),
            (f"What does {name} do?", job, [name]),
            (f"In which country does {name} live?", country, [name, city]),
        ]
    )
    solution = []
    for subject in subjects:
        solution += [call("search", {"query": subject}), result(found({"query": subject}))]
    boxed = reply(f"\\boxed{{{answer}}}")
    tools = tools_among(draw, SEARCH)
    return Exercise(
        question,
        [*solution, boxed],
        lambda said: last_box(said) == answer,
        tools,
        {"search": found},
        asks_for_call=True,
    )


VERBS = ("add", "set", "get", "send", "open", "book", "find", "move")
THINGS = ("event", "lamp", "note", "order", "room", "ticket", "timer", "user", "song", "file")
PARAMETERS = ("name", "city", "room", "title", "color", "day")
COUNTS = ("count", "level", "size", "hours", "price", "id")
DONE = "Done."


def any_tool(draw: random.Random) -> Exercise:
    """A tool that only its schema describes, among others: the names in the call are copied from there."""
    names = [f"{verb}_{thing}" for verb, thing in zip(draw.sample(VERBS, 2), draw.sample(THINGS, 2), strict=True)]
    tools = []
    for name in names:
        text, count = draw.choice(PARAMETERS), draw.choice(COUNTS)
        parameters = draw.choice([{text: "string"}, {count: "integer"}, {text: "string", count: "integer"}])
        tools.append((name, parameters))
    name, parameters = draw.choice(tools)
    arguments = {
        parameter: invented_name(draw) if kind == "string" else number(draw, 3)
        for parameter, kind in parameters.items()
    }
    listed = " and ".join(f"{parameter} {value}" for parameter, value in arguments.items())
    question = f"{name.replace('_', ' the ', 1).capitalize()} with {listed}."
    schemas = [tool_schema(other, f"{other.replace('_', ' ').capitalize()}.", kinds) for other, kinds in tools]
    done = {name: lambda given: "ok" if given == arguments else "error"}
    solution = [call(name, arguments), result("ok"), reply(DONE)]
    return Exercise(question, solution, lambda said: said == DONE, schemas, done, asks_for_call=True)


def tools_among(draw: random.Random, needed: Any) -> list[Any]:
    """The tool alone, or both in any order."""
    if draw.random() < 0.5:
        return [needed]
    return draw.sample([CALCULATOR, SEARCH], 2)
